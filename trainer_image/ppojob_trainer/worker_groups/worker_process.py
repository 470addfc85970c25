"""The Ray actor that holds one worker: one process for each (role, rank).

It fetches the rows that it is sent, runs the worker's method, and keeps big answers in its node's object store.
Methods run one after the other in the order of the calls, so collectives meet their peers. Started by `launch`; it
knows no role.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from ppojob_trainer.telemetry import configure_logging, tee_output
from ppojob_trainer.worker_groups.dispatch import RemoteMethod
from ppojob_trainer.worker_groups.table import Rows, StoredRows, store_rows

__all__ = ["Seat", "WorkerProcess", "num_threads"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """Which process of which group this is, and where it writes.

    local_ranks: processes of the role on the same node, among which its cores are divided.
    timeout_s: longest wait for the rows of a call.
    address: of the process's node, as others reach it; known once it runs.
    """

    role: str
    rank: int
    world_size: int
    local_ranks: int
    log_file: Path
    timeout_s: float
    address: str = ""


class WorkerProcess:
    """Holds the worker that `make` builds; see the module's docstring."""

    def __init__(self, seat: Seat, make: Callable[[Seat], object]) -> None:
        # Before the worker exists: all that it and its children write goes to the storage too.
        self._tee = tee_output(seat.log_file)
        configure_logging()
        _limit_threads(num_threads(seat.local_ranks))
        self._seat = replace(seat, address=str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        self._worker = make(self._seat)

    def address(self) -> str:
        """Return the address under which other nodes reach this one."""
        return self._seat.address

    def execute(
        self,
        method: RemoteMethod[Any, Any, Any, Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stores: bool,
    ) -> Any | StoredRows:
        """Run a registered method of the worker; `stores` keeps the answer here and returns where it lies."""
        pulled = tuple(arg.pull(self._seat.timeout_s) if isinstance(arg, Rows) else arg for arg in args)
        answer = method.function(self._worker, *pulled, **kwargs)
        return store_rows(answer) if stores else answer


def num_threads(local_ranks: int) -> int:
    """Return how many threads a process may use when its role has `local_ranks` processes on this node."""
    return max(1, _num_cores() // max(1, local_ranks))


def _num_cores() -> int:
    """Cores of this node, or of its control group where that is less (a pod's limit)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except OSError:
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def _limit_threads(count: int) -> None:
    # Ray sets OMP_NUM_THREADS to 1 for actors with less than a CPU. The variable is for child processes (vLLM's
    # engine core); torch is loaded already and is told directly.
    os.environ["OMP_NUM_THREADS"] = str(count)
    import torch

    torch.set_num_threads(count)
    logger.info("%s uses %d threads", socket.gethostname(), count)
