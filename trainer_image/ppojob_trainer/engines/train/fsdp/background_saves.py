"""Writes a checkpoint from the host's memory in a thread, while the training continues.

Each engine has one `BackgroundSaves`; `checkpoint.save` starts a save and the engine's `is_saved` polls it. At
most one save runs at a time. The ranks use a separate process group, because collectives of two threads in one group
would be mixed up. Based on `torch.distributed.checkpoint.async_save`, without its copy of everything: `checkpoint.save`
has copied the tensors that would change (`Offloader.tensors_to_save`).
"""

from __future__ import annotations

from concurrent.futures import Future, wait
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


class _Staged(AsyncStager):
    """Stages a state without copying it."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class BackgroundSaves:
    """The save that is running, if any."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._running: tuple[str | Path, Future[Any]] | None = None

    def start(self, state: dict[str, Any], location: str | Path, writer: FileSystemWriter) -> None:
        """Start to write a state to the new location. Collective.

        Args:
            state: in host memory; it must not change before `wait` has returned.
        """
        assert self._running is None, "one save is still under way"
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        started = async_save(state, storage_writer=writer, process_group=self._group, async_stager=_Staged())
        future = started.upload_completion if isinstance(started, AsyncSaveResponse) else started
        self._running = (location, future)

    def wait(self) -> None:
        """Wait until no save is running; `is_done` raises if it failed."""
        if self._running is not None:
            wait([self._running[1]])

    def is_done(self) -> bool:
        """Whether no save is running.

        Raises:
            CheckpointUnwritableError: the last save failed; raised once.
            BucketFailedError: the last save failed because of the object store; raised once.
        """
        if self._running is None:
            return True
        location, future = self._running
        if not future.done():
            return False
        self._running = None
        error = future.exception()
        if error is not None:
            raise unwritable(location, error) from error
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
