"""The ways in which a job's checkpoints can refuse it. `main.py` turns them into a `FailureRecord`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ppojob_trainer.checkpoints.checkpoint import Checkpoint


class FencedOutError(RuntimeError):
    """A newer attempt of the job owns the folder: this one must stop, and save nothing."""

    def __init__(self, folder: Path, *, attempt: int, newer: int) -> None:
        super().__init__(
            f"attempt {attempt} is fenced out: attempt {newer} of the same job owns {folder}; this attempt must end"
        )
        self.newer = newer


class ForeignFilesError(RuntimeError):
    """The folder holds the files of another run."""

    def __init__(self, folder: Path, *, uid: str, owner: str) -> None:
        super().__init__(
            f"{folder} holds the checkpoints of another run (uid {owner}, this run has {uid}): give this run another "
            f"name (or another --output), remove the folder, or go on from those checkpoints on purpose: another name, "
            f"and checkpoint.resumeFrom with the path of one of them"
        )


class CheckpointUnreadableError(RuntimeError):
    """A checkpoint that the run should go on from cannot be read."""

    @classmethod
    def of(cls, broken: Path | Checkpoint, reason: str, *, older: Checkpoint | None) -> Self:
        """Return the error for a folder, with what can be done: the older checkpoint, where there is one."""
        path = broken if isinstance(broken, Path) else broken.path
        offer = (
            f"to go on from step {older.step}, set checkpoint.resumeFrom to {older.path}"
            if older
            else "there is no older one: restore the folder, or start afresh under another name"
        )
        return cls(f"checkpoint {path} cannot be read: {reason}; {offer}")
