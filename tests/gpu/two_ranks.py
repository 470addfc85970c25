"""Starts a module of this folder as several ranks, each with one GPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from tests.integration.trainer.separate_process import VISIBLE_GPUS, gpu

PROJECT = Path(__file__).resolve().parents[2]


def run_two_ranks(module: ModuleType, arguments: Sequence[object], *, limit: float, **environment: str) -> None:
    """Run two ranks, see `run_ranks`."""
    run_ranks(2, module, arguments, limit=limit, environment=environment)


def run_ranks(
    num_ranks: int,
    module: ModuleType,
    arguments: Sequence[object],
    *,
    limit: float,
    gpus: Sequence[int] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m MODULE RANK ARGUMENTS...` for each rank to its end; all must exit with 0.

    NVLink multicast is off, because a machine whose fabric does not serve it fails at the first collective.

    Args:
        limit: longest wait for a rank, in seconds. Ranks that still run are killed.
        gpus: number of each rank's GPU; None: the rank.
        meanwhile: is called while they run.
        environment: more variables of the processes.
    """
    settings = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "4", **(environment or {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module.__name__, str(rank), *map(str, arguments)],
            cwd=PROJECT,
            env={**settings, VISIBLE_GPUS: gpu(number)},
        )
        for rank, number in enumerate(range(num_ranks) if gpus is None else gpus)
    ]
    try:
        meanwhile()
        codes = [rank.wait(limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert codes == [0] * num_ranks
