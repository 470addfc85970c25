"""The layout of a model's parameters in buckets of bytes, equal at both ends of a weight transfer.

Called by `transfer`. Tensors are sent in buckets, because a message for each would cost more than its bytes. A
tensor is never split: one that is larger than a bucket gets a separate bucket.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

BUCKET_BYTES: Final = 256 * 2**20
# A row of the checksum: 64 numbers of 8 bytes. Buckets are whole rows.
_ROW_BYTES: Final = 512
_ALIGNMENT: Final = 16


@dataclass(frozen=True)
class TensorSpec:
    """One parameter, by its name in a HuggingFace checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype; `dtype` is its name without `torch.`."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


class WeightSource(Protocol):
    """A source of weights: a sharded model."""

    def specs(self) -> list[TensorSpec]:
        """Return all parameters, in the order of `gather`."""
        ...

    def gather(self) -> Iterator[Tensor]:
        """Yield each full parameter; the next one may reuse its memory. Collective: every rank iterates to the end."""
        ...


@dataclass(frozen=True)
class Bucket:
    """Some parameters in one buffer of `num_bytes`, each at its offset."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters in a uint8 buffer, as views."""
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            flat = buffer[offset : offset + spec.num_bytes].view(spec.torch_dtype)
            yield spec.name, flat.view(spec.shape)


def make_buckets(specs: Sequence[TensorSpec], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Fill buckets in order, each up to `bucket_bytes`; a larger tensor gets a separate bucket."""
    buckets: list[Bucket] = []
    taken: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in specs:
        if taken and end + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(taken), tuple(offsets), _round_up(end, _ROW_BYTES)))
            taken, offsets, end = [], [], 0
        taken.append(spec)
        offsets.append(end)
        end = _round_up(end + spec.num_bytes, _ALIGNMENT)
    if taken:
        buckets.append(Bucket(tuple(taken), tuple(offsets), _round_up(end, _ROW_BYTES)))
    return buckets


def checksum(buffer: Tensor) -> Tensor:
    """Return an int64 scalar that changes with any bit and with the order of the bucket's rows; exact on any device."""
    rows = buffer.view(torch.int64).view(-1, _ROW_BYTES // 8).sum(dim=1)
    return (rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum()


def buckets_to_text(buckets: Sequence[Bucket]) -> str:
    """Return the buckets' layout as text: compressed, because 45,000 experts by name come near to a store's 8 MiB."""
    layout = json.dumps([asdict(bucket) for bucket in buckets])
    return b64encode(zlib.compress(layout.encode())).decode()


def buckets_from_text(text: bytes) -> list[Bucket]:
    """Undo `buckets_to_text`."""
    return [
        Bucket(
            tuple(TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"]) for spec in entry["specs"]),
            tuple(entry["offsets"]),
            entry["num_bytes"],
        )
        for entry in json.loads(zlib.decompress(b64decode(text)))
    ]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
