"""Copies a checkpoint's tensors to the host's memory and writes them, in threads, while the training continues.

    loop      save ▶ generate ▶ forward passes ▶ update: gradients │ optimizer's step ▶ ... ▶ offload
    threads        copy to the host ────────────────────────────▶  │
                                     write to the storage ─────────────────────────────────▶  (waits for it only if
                                                                                              moments are offloaded)

Each engine has one `BackgroundSaves`; `checkpoint.save` starts a save and the engine's `is_saved` polls it. At
most one save runs at a time. Until all is copied no parameter may change, so an update calls `wait_until_copied` before
its first step. Offloaded tensors have a copy already (`Offloader.to_save`). The ranks use a separate process
group, because collectives of two threads in one group would be mixed up. Based on torch's `async_save`, with a stager
of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from ppojob_trainer.engines.errors import BucketFailedError, CheckpointUnwritableError, EngineError
from ppojob_trainer.engines.train.fsdp.object_storage import is_of_store

__all__ = ["BackgroundSaves", "bucket_failed", "first_line", "unwritable"]


Copying = Callable[[], dict[str, Any]]
"""Returns a state whose tensors are on the host."""


class _Stager(AsyncStager):
    """Copies a state in a thread."""

    _synchronize_after_execute = False

    def __init__(self, copying: Copying) -> None:
        self._copying = copying
        self._thread = ThreadPoolExecutor(1, "copy checkpoint")

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Begin to copy the state, which torch does not need to know."""
        copied = self._thread.submit(self._copying)
        self._thread.shutdown(wait=False)
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass
class _Running:
    location: str | Path
    copied: Future[Any]
    written: Future[Any]


class BackgroundSaves:
    """The save that is running, if any."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._running: _Running | None = None
        self._waited_s: float | None = None

    def start(self, copying: Copying, location: str | Path, writer: FileSystemWriter) -> None:
        """Start to copy a state, and then to write it to the new location. Collective.

        Args:
            copying: called in a thread. What it reads must not change before `wait_until_copied` has returned, and what
                it returns not before `wait` has.
        """
        assert self._running is None, "one save is still under way"
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        started = async_save({}, storage_writer=writer, process_group=self._group, async_stager=_Stager(copying))
        assert isinstance(started, AsyncSaveResponse), "a stager that returns a future gets one"
        self._running = _Running(location, started.staging_completion, started.upload_completion)
        self._waited_s = 0.0

    def wait_until_copied(self) -> None:
        """Wait until parameters and moments may change; `is_done` raises if the save failed."""
        if self._running is not None:
            self._wait(self._running.copied)

    def wait(self) -> None:
        """Wait until no save is running; `is_done` raises if it failed."""
        if self._running is not None:
            self._wait(self._running.written)

    @property
    def waited_s(self) -> float:
        """Seconds that the training has waited for the last save, as far as `take_waited_s` has not returned them."""
        return self._waited_s or 0.0

    def take_waited_s(self) -> float | None:
        """Return `waited_s`, once; None if no save was started since the last call."""
        waited, self._waited_s = self._waited_s, None
        return waited

    def _wait(self, future: Future[Any]) -> None:
        started = time.perf_counter()
        wait([future])
        self._waited_s = self.waited_s + time.perf_counter() - started

    def is_done(self) -> bool:
        """Whether no save is running.

        Raises:
            CheckpointUnwritableError: the last save failed; raised once.
            BucketFailedError: the last save failed because of the object store; raised once.
        """
        if self._running is None:
            return True
        running = self._running
        if not running.written.done():
            return False
        self._running = None
        error = running.written.exception()
        if error is not None:
            raise unwritable(running.location, error) from error
        return True


def unwritable(location: str | Path, error: BaseException) -> EngineError:
    """Return the error for a failed save."""
    if is_of_store(error):
        return bucket_failed(location, "written", error)
    return CheckpointUnwritableError(
        f"checkpoint {location} cannot be written: {first_line(error)}. Check the storage's free space and "
        "permissions; earlier checkpoints are complete"
    )


def bucket_failed(location: str | Path, done: str, error: BaseException) -> BucketFailedError:
    """Return the error for a failure of the object store; `done` describes the operation."""
    return BucketFailedError(
        f"checkpoint {location} cannot be {done}: {first_line(error)}. Check the object store, the network to it "
        "and the credentials of this pod; earlier checkpoints are complete"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; if several ranks failed, of the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {type(cause).__name__}: {first_line(cause)}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
