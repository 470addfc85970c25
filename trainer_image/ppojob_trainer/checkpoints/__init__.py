"""A run's checkpoints as files: atomic, fenced, kept to a number. Imports no torch; the engines fill the folders."""

from ppojob_trainer.checkpoints.checkpoint import Checkpoint
from ppojob_trainer.checkpoints.errors import CheckpointUnreadableError, FencedOutError, ForeignFilesError
from ppojob_trainer.checkpoints.store import CheckpointStore, last_attempt

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "CheckpointUnreadableError",
    "FencedOutError",
    "ForeignFilesError",
    "last_attempt",
]
