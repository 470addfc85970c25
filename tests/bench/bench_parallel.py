"""Compares ways to divide a policy over two GPUs, in updates alone, in one run; prints ratios to the first.

    python -m tests.bench.bench_parallel --output DIR [--shape 1.5B] [--layers N]
        [--layouts data-2,tensor-2,pipeline-2] [--micro-batches 16] [--device CUDA] [--adapters] [--profile]

Without Ray and vLLM: two processes with a GPU each (`parallel_updates` has the layouts' names). All layouts update the
same weights with the same sequences. For a mixture of experts take `--layouts data-2,experts-2`, and for a large one
--adapters, which trains LoRA on the attention alone. Rows whose first gradient norms differ by more than 2 % are not
the same work; the program says so and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ppojob_trainer.engines.network import listen
from tests.bench import parallel_updates, workload
from tests.gpu.two_ranks import run_two_ranks

_LIMIT_S = 500.0


def main() -> None:
    """Measure, print, and write `results.json`: after SIGTERM or a failure, of the layouts that were finished."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    arguments = _arguments()
    output: Path = arguments.output.absolute()
    data = output / "workload"
    data.mkdir(parents=True, exist_ok=True)
    workload.prepare(data, workload.size_of(arguments.shape), 1, layers=arguments.layers)
    stores = {name: listen("127.0.0.1", _LIMIT_S) for name in arguments.layouts}
    work = [arguments.rows, arguments.tokens, arguments.micro_batches, arguments.updates]
    work += [int(arguments.profile), int(arguments.adapters)]
    ports = [f"{name}:{store.port}" for name, store in stores.items()]
    seen = output / "rank-0.json"
    seen.unlink(missing_ok=True)
    try:
        run_two_ranks(parallel_updates, [arguments.device, data / "model", output, *work, *ports], limit=_LIMIT_S)
    finally:
        found = json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else {}
        (output / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        for name, row in found.items():
            if "error" in row:
                sys.stderr.write(f"{name} failed:\n{row['error']}\n")
        rows = {name: row for name, row in found.items() if "error" not in row}
        Console(width=120).print(table(rows, arguments.rows * arguments.tokens, _title(arguments)))
    if len(rows) < len(found) or not are_same_work(rows):
        sys.exit("not all layouts made the same update")


def table(rows: Mapping[str, Mapping[str, Any]], tokens: int, title: str) -> Table:
    """Return a row for each layout; `ratio` is its speed divided by the first layout's."""
    shown = Table(title=title)
    for column in ("layout", "s an update", "tokens/s", "ratio", "MFU", "peak GB", "gradient norm"):
        shown.add_column(column, justify="left" if column == "layout" else "right")
    medians = {name: statistics.median(row["seconds"]) for name, row in rows.items()}
    first = next(iter(medians.values()), 0.0)
    for name, row in rows.items():
        shown.add_row(
            name,
            f"{medians[name]:.3f}",
            f"{tokens / medians[name]:.0f}",
            f"{first / medians[name]:.2f}",
            f"{row['mfu']:.3f}",
            f"{row['peak_gb']:.1f}",
            f"{row['grad_norm']:.4f}",
        )
    return shown


def are_same_work(rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the gradient norms of the first update agree within 2 %, as bfloat16 allows."""
    norms = [float(row["grad_norm"]) for row in rows.values()]
    return not norms or max(norms) <= 1.02 * min(norms)


def _title(arguments: argparse.Namespace) -> str:
    return (
        f"{arguments.shape}, {arguments.rows} sequences of {arguments.tokens} tokens, "
        f"{arguments.micro_batches} micro-batches; median of {arguments.updates} updates of rank 0"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="1.5B")
    parser.add_argument("--layers", type=int, help="decoder layers of the model, where they are not those of the shape")
    parser.add_argument("--device", choices=("CUDA", "CPU"), default="CUDA")
    parser.add_argument("--layouts", default="data-2,tensor-2,pipeline-2")
    parser.add_argument("--rows", type=int, default=64, help="sequences of an update, of both GPUs together")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--micro-batches", type=int, default=16, help="of a pipeline; data parallel ranks have half")
    parser.add_argument("--updates", type=int, default=3, help="after two updates that do not count")
    parser.add_argument("--adapters", action="store_true", help="train LoRA on the attention, and nothing else")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="of one more update of each layout, into OUTPUT/profile-LAYOUT-RANK.txt and .json.gz (a Chrome trace)",
    )
    arguments = parser.parse_args()
    arguments.layouts = arguments.layouts.split(",")
    if unknown := [name for name in arguments.layouts if name not in parallel_updates.LAYOUTS]:
        parser.error(f"--layouts {unknown[0]}: take some of {', '.join(parallel_updates.LAYOUTS)}")
    if arguments.rows % (2 * arguments.micro_batches):
        parser.error(
            f"--rows {arguments.rows}: two GPUs divide them into {arguments.micro_batches} micro-batches, so take a "
            f"multiple of {2 * arguments.micro_batches}"
        )
    return arguments


if __name__ == "__main__":
    main()
