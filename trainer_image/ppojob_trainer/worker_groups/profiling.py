"""Profiles of chosen steps: torch's profiler, and the history of the CUDA allocator, around each call of a process.

`observation` calls it in the processes of the roles that `spec.telemetry.profile` names. Calls of other steps have no
overhead. Each call writes separate files, so none depends on a later call:
`<role>-rank<r>-step<n>-<method>.json.gz` and `.memory.pickle`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ppojob_api.v1alpha1.telemetry import ProfileSpec
from ppojob_trainer.telemetry.current_phase import CurrentPhase

__all__ = ["Profiler"]

logger = logging.getLogger(__name__)

MAX_ALLOCATIONS = 200_000
"""Entries of the allocator's history; about 100 MB in the snapshot."""


class Profiler:
    """Profiles the calls of one process."""

    def __init__(self, who: str, settings: ProfileSpec, folder: Path) -> None:
        """
        Args:
            who: prefix of the file names, such as `actor-rank0`.
            folder: where the files go; created when the first one is written.
        """
        self._who = who
        self._steps = frozenset(settings.steps)
        self._wants_memory = settings.memory
        self._folder = folder

    @contextmanager
    def around(self, method: str, phase: CurrentPhase | None) -> Iterator[None]:
        """Profile the block if it serves one of the chosen steps."""
        if phase is None or phase.step not in self._steps:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{self._who}-step{phase.step}-{method}"
        with ExitStack() as stack:
            if self._wants_memory:
                stack.enter_context(_allocations(target.with_name(f"{target.name}.memory.pickle")))
            stack.enter_context(_activities(target.with_name(f"{target.name}.json.gz")))
            yield


@contextmanager
def _activities(target: Path) -> Iterator[None]:
    """Write the times of the block's operators and kernels in Chrome's trace format, even if the block raises."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, record_shapes=True)
    profiler.start()
    try:
        yield
    finally:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Kernels that still run are part of the call.
            torch.cuda.synchronize()
        profiler.stop()
        profiler.export_chrome_trace(str(target))
        logger.info("profile: %s", target)


@contextmanager
def _allocations(target: Path) -> Iterator[None]:
    """Write the block's allocations on the GPU, for PyTorch's memory viewer."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        logger.warning("no memory snapshot: this process uses no GPU, and snapshots are of CUDA's allocator")
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(target))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("memory snapshot: %s", target)
