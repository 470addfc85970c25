"""A run's checkpoints, in a folder or in a bucket: atomic, fenced, limited in number. Imports no torch.

The engines write their contents.
"""

from ppojob_trainer.checkpoints.checkpoint import Checkpoint
from ppojob_trainer.checkpoints.errors import (
    BucketError,
    BucketRefusedError,
    BucketUnreachableError,
    CheckpointUnreadableError,
    CredentialsMissingError,
    FencedOutError,
    ForeignCheckpointError,
    ForeignFilesError,
)
from ppojob_trainer.checkpoints.store import CheckpointStore, last_attempt, open_store

__all__ = [
    "BucketError",
    "BucketRefusedError",
    "BucketUnreachableError",
    "Checkpoint",
    "CheckpointStore",
    "CheckpointUnreadableError",
    "CredentialsMissingError",
    "FencedOutError",
    "ForeignCheckpointError",
    "ForeignFilesError",
    "last_attempt",
    "open_store",
]
