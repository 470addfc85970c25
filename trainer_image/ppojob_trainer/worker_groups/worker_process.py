"""The Ray actor that holds one worker: one process for each (role, rank).

It fetches its rows, runs the worker's method, and keeps large answers in its node's object store. Measurements of the
process are a second, small answer (`observation`). Methods run one after the other in the order of the calls, so that
all ranks enter collectives in the same order. Started by `launch`; it is independent of the role.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import ray

from ppojob_api.v1alpha1.telemetry import ProfileSpec
from ppojob_trainer.engines.errors import (
    BucketFailedError,
    CheckpointUnwritableError,
    RendezvousError,
    WeightLinkError,
    WeightReceiptError,
)
from ppojob_trainer.protocol import DataProto, check_layout
from ppojob_trainer.telemetry import CurrentPhase, RunFiles, configure_logging, tee_output
from ppojob_trainer.worker_groups.dispatch import RemoteMethod
from ppojob_trainer.worker_groups.errors import GPUFaultError, NotRenewableError, SupersededError
from ppojob_trainer.worker_groups.gpu_faults import is_gpu_fault
from ppojob_trainer.worker_groups.observation import Moved, Observed, Observer
from ppojob_trainer.worker_groups.stored_rows import StoredRows, counted_stores, store_rows
from ppojob_trainer.worker_groups.table import Pulled, Rows

__all__ = ["WorkerContext", "WorkerProcess", "num_threads"]

logger = logging.getLogger(__name__)

THREADS_BESIDE_GPU = 4
_HARMLESS = (WeightLinkError, WeightReceiptError, RendezvousError, CheckpointUnwritableError, BucketFailedError)
"""Failures that leave a worker as it was: another connection is opened, another checkpoint is written."""


@dataclass(frozen=True)
class WorkerContext:
    """What a process knows of itself: its rank in its group, its node, and its files.

    local_world_size: number of the group's processes on the same node; they share its cores.
    timeout_s: longest wait for the rows of a call, in seconds.
    address: network address of the process's node; set once it runs.
    attempt: that started the process.
    run_folder: the job's folder; None if only the log is written.
    profile: settings of torch's profiler, if this role is profiled.
    """

    role: str
    rank: int
    world_size: int
    local_world_size: int
    log_file: Path
    timeout_s: float
    address: str = ""
    attempt: int = 0
    run_folder: Path | None = None
    profile: ProfileSpec | None = None


class Renewable(Protocol):
    """A worker whose process may continue in the next attempt (`survivors`)."""

    def renew(self) -> None:
        """End what the last attempt has begun. Later calls of what prepares the worker find it ready.

        Raises:
            NotRenewableError: it is not ready.
        """
        ...


class WorkerProcess:
    """Holds the worker that `make` creates; see the module's docstring."""

    def __init__(self, context: WorkerContext, make: Callable[[WorkerContext], object]) -> None:
        # Before the worker is created, so that all output of it and its children is copied to the storage.
        self._tee = tee_output(context.log_file)
        configure_logging()
        _limit_threads(num_threads(context.local_world_size, has_gpu=bool(ray.get_gpu_ids())))
        self._context = replace(context, address=str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        folder = None if context.run_folder is None else RunFiles(context.run_folder).profiles
        self._observer = Observer(context.role, context.rank, context.profile, folder)
        self._worker = make(self._context)
        # The attempt whose calls are executed.
        self._attempt = context.attempt
        # The first failure of a method after which the worker's state is unknown.
        # As text: the exception would keep its frames, and what they hold on the GPU.
        self._failure: str | None = None

    def address(self) -> str:
        """Return the address under which other nodes reach this one."""
        return self._context.address

    def renew(self, attempt: int) -> Path:
        """Prepare the worker for a later attempt, and refuse calls of earlier ones; return this process's log file.

        Raises:
            NotRenewableError: the worker's state is unknown, it was not ready yet, or it works for a later attempt.
        """
        if attempt <= self._attempt:
            raise NotRenewableError(f"it works for attempt {self._attempt}")
        self._attempt = attempt
        if self._failure is not None:
            raise NotRenewableError(f"a call has failed: {self._failure}")
        cast(Renewable, self._worker).renew()
        return self._context.log_file

    @ray.method(num_returns=2)
    def execute(
        self,
        method: RemoteMethod[Any, Any, Any, Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stores: bool,
        phase: CurrentPhase | None,
        is_wanted: bool = True,
        attempt: int = 0,
    ) -> tuple[Any | StoredRows, Observed]:
        """Run a registered method of the worker.

        Args:
            stores: keep the answer on this node and return references to it.
            is_wanted: False drops the answer, because another rank of the same parallel group returns it.
            attempt: that calls.

        Raises:
            SupersededError: the process works for another attempt.
        """
        if attempt != self._attempt:
            raise SupersededError(f"attempt {attempt} calls, and the process works for attempt {self._attempt}")
        moved = Moved()
        with self._observer.around(method.__name__, phase):
            with moved.timed():
                pulled = [arg.pull(self._context.timeout_s) if isinstance(arg, Rows) else arg for arg in args]
            moved.fetched_bytes = sum(found.num_bytes for found in pulled if isinstance(found, Pulled))
            given = [found.batch if isinstance(found, Pulled) else found for found in pulled]
            with counted_stores() as stored:
                answer = self._computed(method, given, kwargs)
                with moved.timed():
                    answer = store_rows(_with_each_row(answer, given[0])) if stores else answer
            moved.stored_bytes = stored.num_bytes
            answer = answer if is_wanted else None
        return answer, self._observer.observed(phase, moved)

    def _computed(
        self, method: RemoteMethod[Any, Any, Any, Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the answer of the worker's method. A failed GPU is reported with the address of this pod.

        Raises:
            GPUFaultError: the GPU of this process has failed.
        """
        try:
            return method.function(self._worker, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, _HARMLESS):
                self._failure = self._failure or f"{type(error).__name__}: {error}"
            if not is_gpu_fault(error):
                raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            # A worker of vLLM may be on another node of the engine.
            address = (isinstance(error, WeightReceiptError) and error.address) or self._context.address
            raise GPUFaultError(f"a GPU in the pod with address {address} has failed: {first}", address) from error


def _with_each_row(answer: Any, sent: DataProto) -> DataProto:
    """Return the answer, after checking that it has one row for each row that was sent, and the layout of columns."""
    if not isinstance(answer, DataProto) or len(answer) != len(sent):
        found = f"{len(answer)} rows" if isinstance(answer, DataProto) else f"a {type(answer).__name__}"
        raise TypeError(f"the method returned {found}, wanted a DataProto with a row for each of the {len(sent)}")
    check_layout(answer, sent)
    return answer


def num_threads(local_world_size: int, *, has_gpu: bool = False) -> int:
    """Return how many threads a process may use when its group has `local_world_size` processes on this node.

    A process with a GPU uses the CPU only to divide batches: many threads of many such processes would contend.
    """
    threads = max(1, _num_cores() // max(1, local_world_size))
    return min(threads, THREADS_BESIDE_GPU) if has_gpu else threads


def _num_cores() -> int:
    """Cores of this node, or of its control group if that has fewer (a pod's limit)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except OSError:
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def _limit_threads(count: int) -> None:
    # Ray sets OMP_NUM_THREADS to 1 for actors with less than one CPU. The variable is for child processes (vLLM's
    # engine core); torch is loaded already, so its number of threads is set directly.
    os.environ["OMP_NUM_THREADS"] = str(count)
    import torch

    torch.set_num_threads(count)
    logger.info("%s uses %d threads", socket.gethostname(), count)
