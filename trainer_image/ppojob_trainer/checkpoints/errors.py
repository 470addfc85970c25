"""The errors of a job's checkpoints. `main` turns them into a `FailureRecord`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ppojob_api.v1alpha1.constants import ANNOTATION_ADOPT

if TYPE_CHECKING:
    from ppojob_trainer.checkpoints.checkpoint import Checkpoint

UNKNOWN_OWNER = "unknown"
"""In place of the uid of a run whose checkpoints do not name it."""


class FencedOutError(RuntimeError):
    """A newer attempt of the job owns the folder: this one must stop, and save nothing."""

    def __init__(self, location: str, *, attempt: int, newer: int) -> None:
        super().__init__(
            f"attempt {attempt} is fenced out: attempt {newer} of the same job owns {location}; this attempt must end"
        )
        self.newer = newer


class ForeignFilesError(RuntimeError):
    """The folder, or the address, holds the checkpoints of another run."""

    def __init__(self, location: str, *, uid: str, owner: str) -> None:
        super().__init__(
            f"{location} holds the checkpoints of another run (uid {owner}, this run has {uid}). To continue that "
            f"run, annotate the PPOJob with {ANNOTATION_ADOPT}={owner} and run it again (`kubectl ppo retry`). Or "
            f"create the job again with checkpoint.resume: Never to start in its own folder (`ppojob run`: use another "
            f"--output), or with checkpoint.resumeFrom: PATH OF A CHECKPOINT to continue from that one"
        )


class ForeignCheckpointError(RuntimeError):
    """A checkpoint of another run has the name of one that this run is about to save."""

    def __init__(self, location: str) -> None:
        super().__init__(
            f"{location} is a checkpoint of another run, and this run saves one of that name: move or delete it, or "
            "set checkpoint.path to another address, and create the job again"
        )


class CheckpointUnreadableError(RuntimeError):
    """The checkpoint to resume from cannot be read."""

    @classmethod
    def of(cls, location: str, reason: str, *, older: Checkpoint | None) -> Self:
        """Return the error for a folder or an address, with the remedy: the older checkpoint, if there is one."""
        offer = (
            f"to resume from step {older.step}, set checkpoint.resumeFrom to {older.location}"
            if older
            else "there is no older checkpoint: restore this one, or create a new job with another name"
        )
        return cls(f"checkpoint {location} cannot be read: {reason}; {offer}")


class BucketError(RuntimeError):
    """An object store cannot be used for checkpoints; the message has the store's error and the remedy."""


class BucketRefusedError(BucketError):
    """There is no such bucket, the credentials may not use it, or it cannot do conditional writes."""


class CredentialsMissingError(BucketError):
    """There are no credentials in the environment or on the machine."""


class BucketUnreachableError(BucketError):
    """The object store did not answer, or failed."""
