"""Measures the calls of a process: GPU memory and utilization, transferred data, profiles, stacks.

In a process, an `Observer` wraps each call. Its `Observed` is returned as a small second answer of the call, so it
needs no further call. In the controller, `Observations` collects them and computes the metrics of a step. On CPU only
the transferred data is measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from ppojob_api.v1alpha1.telemetry import ProfileSpec
from ppojob_trainer.telemetry.current_phase import CurrentPhase, within_phase
from ppojob_trainer.worker_groups.gpu_sampler import GpuSampler, GpuUse
from ppojob_trainer.worker_groups.profiling import Profiler
from ppojob_trainer.worker_groups.watchdog import watched

__all__ = ["Moved", "Observations", "Observed", "Observer", "observed_metrics"]

_BYTES_PER_GB = 1e9
_BYTES_PER_MB = 1e6
_MAX_PENDING = 10_000


@dataclass
class Moved:
    """The data transfer of one call: seconds to fetch its rows and to store its answer in the node's object store.

    fetched_bytes: of the columns' blocks that it fetched. stored_bytes: of the columns that it stored.
    """

    seconds: float = 0.0
    fetched_bytes: int = 0
    stored_bytes: int = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Observed:
    """One call of one process.

    allocated_peak_bytes, reserved_peak_bytes: the most that torch allocated during the call, and that it kept for this
    process, which includes free memory; None without CUDA. gpu: samples since the process's last call; None without a
    GPU. phase: the phase of the call. moved: its data transfer; None if it had none.
    """

    role: str
    step: int
    allocated_peak_bytes: int | None = None
    gpu: GpuUse | None = None
    phase: str = ""
    moved: Moved | None = None
    reserved_peak_bytes: int | None = None


class Observer:
    """Wraps the calls of one process."""

    def __init__(self, role: str, rank: int, profile: ProfileSpec | None, profile_folder: Path | None) -> None:
        self._role = role
        self._who = f"{role} rank {rank}"
        gpu_ids = ray.get_gpu_ids()
        self._has_gpu = bool(gpu_ids)
        self._sampler = GpuSampler.open(gpu_ids)
        self._profiler = Profiler(f"{role}-rank{rank}", profile, profile_folder) if profile and profile_folder else None

    @contextmanager
    def around(self, method: str, phase: CurrentPhase | None) -> Iterator[None]:
        """Set the current phase for the block, and measure the block."""
        with ExitStack() as stack:
            stack.enter_context(within_phase(phase))
            stack.enter_context(watched(self._who, method, phase))
            if self._profiler is not None:
                stack.enter_context(self._profiler.around(method, phase))
            yield

    def observed(self, phase: CurrentPhase | None, moved: Moved) -> Observed:
        """Return the measurements since the last call of this method."""
        step, name = (0, "") if phase is None else (phase.step, phase.phase)
        data = moved if moved.fetched_bytes or moved.stored_bytes else None
        if not self._has_gpu:
            return Observed(self._role, step, phase=name, moved=data)
        allocated, reserved = _memory_peaks()
        return Observed(self._role, step, allocated, self._gpu_use(), name, data, reserved)

    def _gpu_use(self) -> GpuUse | None:
        if self._sampler is not None:
            return self._sampler.take()
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        free, total = torch.cuda.mem_get_info()
        return GpuUse(total - free, total)


class Observations:
    """Collects the measurements of all groups' calls until they are taken."""

    def __init__(self) -> None:
        self._refs: deque[ObjectRef[Observed]] = deque(maxlen=_MAX_PENDING)
        self._later: list[Observed] = []

    def add(self, ref: ObjectRef[Any]) -> None:
        """Add a call that was sent."""
        self._refs.append(ref)

    def take(self, step: int) -> list[Observed]:
        """Remove and return the measurements that arrived for steps up to `step`; keep later ones. Never waits."""
        refs = list(self._refs)
        if refs:
            ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
            self._refs = deque(waiting, maxlen=_MAX_PENDING)
            self._later += [observed for ref in ready if (observed := _answer(ref)) is not None]
        found = [observed for observed in self._later if observed.step <= step]
        self._later = [observed for observed in self._later if observed.step > step]
        return found


def observed_metrics(observed: Iterable[Observed], pool_of: Mapping[str, str]) -> dict[str, float]:
    """Return the metrics of a step's calls; memory in GB (1e9 bytes), the maximum over ranks and GPUs.

    perf/max_memory_allocated_gb/<role>, perf/max_memory_reserved_gb/<role>: by torch, without and with the free memory
    that it keeps. pool/<name>/memory_peak_gb: in use on a GPU of the pool, by all its
    processes. pool/<name>/memory_total_gb: memory of that GPU. pool/<name>/gpu_utilization: mean share of the time in
    which a kernel ran, from 0 to 1.
    comm_s/<phase>: seconds that the slowest rank took to fetch its rows and to store its answer, which are part of
    timing_s/<phase>. comm_mb/<phase>, comm_stored_mb/<phase>: the columns that all ranks fetched and stored, in MB (1e6
    bytes).
    """
    metrics: dict[str, float] = {}
    utilizations: dict[str, list[GpuUse]] = {}
    for call in observed:
        if call.allocated_peak_bytes is not None:
            _raise_to(metrics, f"perf/max_memory_allocated_gb/{call.role}", call.allocated_peak_bytes / _BYTES_PER_GB)
        if call.reserved_peak_bytes is not None:
            _raise_to(metrics, f"perf/max_memory_reserved_gb/{call.role}", call.reserved_peak_bytes / _BYTES_PER_GB)
        if call.moved is not None and call.phase:
            _raise_to(metrics, f"comm_s/{call.phase}", call.moved.seconds)
            _add_to(metrics, f"comm_mb/{call.phase}", call.moved.fetched_bytes / _BYTES_PER_MB)
            _add_to(metrics, f"comm_stored_mb/{call.phase}", call.moved.stored_bytes / _BYTES_PER_MB)
        pool = pool_of.get(call.role)
        if call.gpu is not None and pool is not None:
            _raise_to(metrics, f"pool/{pool}/memory_peak_gb", call.gpu.memory_peak_bytes / _BYTES_PER_GB)
            if call.gpu.memory_total_bytes:
                _raise_to(metrics, f"pool/{pool}/memory_total_gb", call.gpu.memory_total_bytes / _BYTES_PER_GB)
            utilizations.setdefault(pool, []).append(call.gpu)
    for pool, uses in utilizations.items():
        number = sum(use.num_utilizations for use in uses)
        if number:
            metrics[f"pool/{pool}/gpu_utilization"] = sum(use.utilization_sum for use in uses) / number
    return metrics


def _raise_to(metrics: dict[str, float], name: str, value: float) -> None:
    metrics[name] = max(metrics.get(name, 0.0), value)


def _add_to(metrics: dict[str, float], name: str, value: float) -> None:
    metrics[name] = metrics.get(name, 0.0) + value


def _memory_peaks() -> tuple[int | None, int | None]:
    """Return the most bytes that torch allocated, and reserved, since the last call."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None, None
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks


def _answer(ref: ObjectRef[Observed]) -> Observed | None:
    try:
        return ray.get(ref)
    except Exception:  # noqa: BLE001 - a call that failed has nothing to show, and its own answer says why
        return None
