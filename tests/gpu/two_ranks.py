"""Starts a module of this folder as two ranks, each with one GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]


def run_two_ranks(module: ModuleType, arguments: Sequence[object], *, limit: float, **environment: str) -> None:
    """Run `python -m MODULE RANK ARGUMENTS...` for ranks 0 and 1 to their end; both must exit with 0.

    NVLink multicast is off, because a machine whose fabric does not serve it fails at the first collective.

    Args:
        limit: longest wait for a rank, in seconds. Ranks that still run are killed.
        environment: more variables of the processes.
    """
    settings = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "4", **environment}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module.__name__, str(rank), *map(str, arguments)],
            cwd=PROJECT,
            env={**settings, "CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        codes = [rank.wait(limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert codes == [0, 0]
