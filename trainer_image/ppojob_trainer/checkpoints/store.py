"""The guarantees of a run's checkpoints, and the store for a location. Only the driver calls it; the ranks write their
shards to the location that `begin` returns.

A kill at any moment leaves the newest complete checkpoint readable: a checkpoint is valid when all of it is written,
then the tracker names it, and older ones are deleted last. A higher attempt fences a lower one out. A store reads no
tensors. It deletes only checkpoints whose manifest names this run, and incomplete ones that this run's attempts left.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import bucket_store, folder_store
from ppojob_trainer.checkpoints.address import is_address
from ppojob_trainer.checkpoints.checkpoint import Checkpoint

__all__ = ["CheckpointStore", "last_attempt", "open_store"]


class CheckpointStore(Protocol):
    """Writes, finds and deletes the checkpoints of one attempt. For a bucket, every call may raise `BucketError`."""

    def claim(self, *, adopts: bool = False, adopted_uid: str | None = None) -> None:
        """Make this attempt the only one that writes here; call it before anything is loaded.

        Args:
            adopts: allow checkpoints of any other run here. They stay, and that run can no longer save.
            adopted_uid: allow those of this run, or those without one (`UNKNOWN_OWNER`). None: of none.

        Raises:
            FencedOutError: a newer attempt of the same job is there.
            ForeignFilesError: another run's checkpoints are there, and are not to be adopted.
        """
        ...

    def resume_point(self, policy: ResumePolicy, resume_from: str | None) -> Checkpoint | None:
        """Return the checkpoint to resume from; None: start from the beginning.

        `resume_from` is a folder or an address, and is used once: an attempt that finds checkpoints written after it
        resumes from those. If it is one of this run's own checkpoints, the run is rolled back to it.

        Raises:
            CheckpointUnreadableError: the checkpoint is incomplete; the message names it and the older one.
        """
        ...

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint.

        Raises:
            CheckpointUnreadableError: it is incomplete.
        """
        ...

    def older_than(self, step: int) -> Checkpoint | None:
        """Return the newest complete checkpoint before `step`."""
        ...

    def begin(self, step: int) -> str:
        """Return an empty folder or address for the shards of `step`; deletes what earlier attempts left incomplete.

        Raises:
            FencedOutError: a newer attempt owns the place.
        """
        ...

    def abandon(self, step: int) -> None:
        """Remove what was written since `begin`."""
        ...

    def commit(self, step: int, *, state: Mapping[str, Any], keep: int) -> Checkpoint:
        """Make what was written since `begin` the newest checkpoint, then delete all but the newest `keep`.

        `state` is JSON, and comes back in `Checkpoint.state`. Retries of the same step replace it.

        Raises:
            FencedOutError: a newer attempt owns the place; the tracker was not touched.
        """
        ...


def open_store(location: str, *, uid: str, attempt: int) -> CheckpointStore:
    """Return the store of a run in a folder or at an address.

    Raises:
        BucketError: the environment's settings for the object store cannot be used.
    """
    if is_address(location):
        return bucket_store.BucketStore(location, uid=uid, attempt=attempt)
    return folder_store.FolderStore(Path(location), uid=uid, attempt=attempt)


def last_attempt(location: str) -> int | None:
    """Return the number of the last attempt that wrote there; None if there is none or it cannot be read.

    Raises:
        BucketError: the object store cannot be read.
    """
    return bucket_store.last_attempt(location) if is_address(location) else folder_store.last_attempt(Path(location))
