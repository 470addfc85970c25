"""What one end of a weight transfer sent or loaded, and the comparison of both ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.weights.buckets import Bucket

UNREAD: Final = "unread"
"""Key of the names that a worker's loaders did not read, beside the fields of its receipt."""


@dataclass(frozen=True)
class Receipt:
    """A record of the weights that one end sent or loaded: equal receipts mean equal weights.

    is_read_back: whether the weights were compared with the engine's own parameters after loading.
    """

    version: int
    num_tensors: int
    num_bytes: int
    checksums: tuple[int, ...]
    is_read_back: bool = field(default=False, compare=False)


def verify(sent: Receipt, received: Sequence[Receipt]) -> None:
    """Compare the weights that the trainer sent with those that each replica loaded.

    Raises:
        WeightSyncError: a replica has other weights; names the replica and the first difference.
    """
    for replica, receipt in enumerate(received):
        if receipt != sent:
            raise WeightSyncError(
                f"rollout replica {replica} has other weights than the trainer: {_difference(sent, receipt)}"
            )


def read_by_none(unread: Sequence[Collection[str]]) -> list[str]:
    """Return the weights that no worker of an engine read, given those that each worker did not read."""
    first, *others = unread
    left = set(first).intersection(*others)
    return [name for name in first if name in left]


def receipt_of(version: int, buckets: Sequence[Bucket], checksums: Sequence[Tensor]) -> Receipt:
    """Return the receipt of buckets that were sent or loaded. Waits for the device."""
    num_tensors = sum(len(bucket.specs) for bucket in buckets)
    num_bytes = sum(spec.num_bytes for bucket in buckets for spec in bucket.specs)
    return Receipt(version, num_tensors, num_bytes, tuple(torch.stack(list(checksums)).tolist()))


def _difference(sent: Receipt, received: Receipt) -> str:
    if (sent.version, sent.num_tensors) != (received.version, received.num_tensors):
        return (
            f"version {received.version} with {received.num_tensors} tensors, "
            f"sent was version {sent.version} with {sent.num_tensors}"
        )
    pairs = enumerate(zip(sent.checksums, received.checksums, strict=False))
    first = next((index for index, (mine, theirs) in pairs if mine != theirs), None)
    return f"version {sent.version} differs in bucket {first} of {len(sent.checksums)}"
