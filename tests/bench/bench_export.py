"""Exports a model from several ranks on CPU, by one writer and by all; prints seconds and what each rank's memory took.

    python -m tests.bench.bench_export [--ranks 4] [--layers 12] [--hidden 1024] [--file-mb 100] [--rounds 2]

Both exports are of the same processes, in turns, and their files must be equal. Memory is the most that the call took
beside what was there before. What parallel writers save depends on the storage: one disk may be no faster for several.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import export as export_module
from ppojob_trainer.engines.train.fsdp import export_files
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines import test_engine_peers
from tests.unit.trainer.engines.host_memory_ranks import most_taken
from tests.unit.trainer.engines.tiny_llama import save_tiny_model
from tests.unit.trainer.engines.two_ranks import make_policy

MB = 10**6
LIMIT_S = 1800
WRITERS = ("one writer", "all ranks")


def measure(
    parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path, *, file_mb: int, rounds: int
) -> dict[str, Any]:
    """Run on each rank: return the seconds and the memory of each export, after one that is not counted."""
    export_module.SHARD_BYTES = file_mb * MB  # type: ignore[misc]
    policy = make_policy(parallel, model)
    policy.export(folder / "first")
    found: dict[str, Any] = {name: [] for name in WRITERS}
    for number in range(rounds):
        for name in WRITERS:
            target = folder / f"{name} {number}"
            with mock.patch.object(export_files, "_writer", first_rank if name == WRITERS[0] else export_files._writer):
                parallel.barrier()
                start = time.perf_counter()
                taken = most_taken(functools.partial(policy.export, target))
                parallel.barrier()
            found[name].append((time.perf_counter() - start, taken))
    return found


def first_rank(number: int, num_files: int, num_ranks: int) -> int:
    """Let rank 0 write all files."""
    return 0


def digests(folder: Path) -> dict[str, str]:
    """Return the checksums of the weights and their index."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors*"))}


def report(name: str, ranks: Sequence[dict[str, Any]]) -> float:
    """Print a line; return the fewest seconds."""
    seconds = [spent for spent, _ in ranks[0][name]]
    peaks = [max(taken for _, taken in rank[name]) / MB for rank in ranks]
    print(f"{name}: {', '.join(f'{spent:.2f} s' for spent in seconds)}; most memory of each rank in MB: ", end="")
    print(", ".join(f"{peak:.0f}" for peak in peaks))
    return min(seconds)


def main() -> None:
    """Make the model, start the ranks, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--file-mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    arguments = parser.parse_args()
    shape = {"hidden_size": arguments.hidden, "intermediate_size": 3 * arguments.hidden}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        model = save_tiny_model(folder / "model", num_hidden_layers=arguments.layers, **shape)
        work = functools.partial(measure, file_mb=arguments.file_mb, rounds=arguments.rounds)
        with mock.patch.object(test_engine_peers, "LIMIT_SECONDS", LIMIT_S):
            test_engine_peers.run_ranks(ParallelDims(shard=arguments.ranks), model, folder, work)
        ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(arguments.ranks)]
        exports = [digests(folder / f"{name} 0") for name in WRITERS]
        size = sum(path.stat().st_size for path in (folder / "first").glob("*.safetensors"))
        print(f"{size / MB:.0f} MB in {len(exports[0]) - 1} files of at most {arguments.file_mb} MB, ", end="")
        print(f"{arguments.ranks} ranks; the files are {'equal' if exports[0] == exports[1] else 'DIFFERENT'}")
        one, all_ranks = (report(name, ranks) for name in WRITERS)
        print(f"one writer : all ranks = {one / all_ranks:.2f} (fewest seconds of each)")
        assert exports[0] == exports[1]


if __name__ == "__main__":
    main()
