"""Compares variants of a rollout's engine on one GPU, one after the other, and prints ratios to the first.

    python -m tests.bench.bench_generation --output DIR [--shape 0.5B] [--variants default,drafts] [--prompts 256,32,8]
        [--lengths varied] [--repeats 0.7] [--profile]

Each variant (`variants` has their names) is an engine in a process of its own, with the options of workload W.
With --repeats, the model samples its last token again with this probability, so that drafts are right as often as in a
text that repeats itself; with the workload's own random weights they never are. With --lengths varied, few sequences
are left at the end of a batch. --profile writes into each log where the engine's thread spends its time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from tests.bench import workload
from tests.bench.generation import Alone, Work, measure_variant
from tests.bench.layouts import layout
from tests.bench.variants import VARIANTS


def main() -> None:
    """Measure, print, and write `results.json`."""
    arguments = _arguments()
    output: Path = arguments.output.absolute()
    most = arguments.tokens or (48 if arguments.shape == "tiny" else workload.RESPONSE_TOKENS)
    size = replace(workload.size_of(arguments.shape), response_tokens=most)
    data = output / f"workload-{arguments.shape}-{arguments.repeats or 0:g}"
    data.mkdir(parents=True, exist_ok=True)
    workload.prepare(data, size, 4)
    if arguments.repeats is not None:
        workload.let_repeat(data, arguments.repeats)
    job = workload.job(data, size, layout("colocated-1", 1), 4, arguments.device)
    file = output / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    work = Work(arguments.prompts, arguments.batches, arguments.lengths == "varied", arguments.profile)
    console, found = Console(width=arguments.width), dict[str, Mapping[int, Alone]]()
    for name in arguments.variants:
        try:
            found[name] = measure_variant(file, name, work, output / name)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            # The others are worth their figures; the log has all of it.
            console.print(f"{name}: {error}", markup=False)
            continue
        console.print(f"{name}: {', '.join(f'{n} prompts {one.median_s:.3f} s' for n, one in found[name].items())}")
        rows = {key: {n: asdict(one) for n, one in of_one.items()} for key, of_one in found.items()}
        (output / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    console.print(table(found, work.prompts))


def table(found: Mapping[str, Mapping[int, Alone]], prompts: tuple[int, ...]) -> Table:
    """Return a row for each variant: seconds of a batch, how many times faster than the first, and its drafts."""
    shown = Table(title="the engine alone: seconds of a batch, medians (x: times as fast as the first variant)")
    shown.add_column("variant")
    for number in prompts:
        shown.add_column(f"{number} prompts", justify="right")
    shown.add_column("accepted per draft, share of steps with drafts")
    first = next(iter(found.values()), {})
    for name, of_one in found.items():
        cells = [f"{of_one[n].median_s:.3f} ({first[n].median_s / of_one[n].median_s:.2f}x)" for n in prompts]
        shown.add_row(name, *cells, ", ".join(_drafts(of_one[n]) for n in prompts))
    return shown


def _drafts(alone: Alone) -> str:
    drafts = alone.drafts
    if not drafts.num_drafted:
        return "-"
    return f"{drafts.num_accepted / drafts.num_drafted:.2f} {drafts.num_drafted / drafts.num_steps:.0%}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="0.5B")
    parser.add_argument("--device", choices=("CUDA", "CPU"), default="CUDA")
    parser.add_argument("--variants", default="default,drafts", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--prompts", default="256", help="of a batch; several numbers with commas")
    parser.add_argument("--batches", type=int, default=3, help="after the warm-up")
    parser.add_argument("--tokens", type=int, help="the most of a response (default: the workload's)")
    parser.add_argument("--lengths", choices=("equal", "varied"), default="equal", help="of the responses")
    parser.add_argument("--repeats", type=float, help="probability that the model samples its last token again")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--width", type=int, default=150, help="of the table, in letters")
    arguments = parser.parse_args()
    arguments.variants = arguments.variants.split(",")
    arguments.prompts = tuple(int(number) for number in arguments.prompts.split(","))
    if unknown := [name for name in arguments.variants if name not in VARIANTS]:
        parser.error(f"--variants {unknown[0]}: there is no such variant; take some of {', '.join(VARIANTS)}")
    if arguments.repeats is not None and not 0 < arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats}: it is a probability above 0 and below 1")
    return arguments


if __name__ == "__main__":
    main()
