"""The layout of a model's parameters in buckets of bytes, equal at both ends of a weight transfer.

Called by `sender` and `receiver`. Tensors are sent in buckets, because a message for each would cost more than its
bytes. A tensor is never split: one that is larger than a bucket gets a separate bucket. A bucket may have only some
boxes of a tensor, one after the other; the receiver's tensor is whole in any case, and has NaN outside of them.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from ppojob_trainer.engines.weights.boxes import Box, inside, num_numbers, whole_box
from ppojob_trainer.engines.weights.sums import num_sums

BUCKET_BYTES: Final = 256 * 2**20
# A row of the checksum: 64 numbers of 8 bytes. Buckets are whole rows.
_ROW_BYTES: Final = 512
_ALIGNMENT: Final = 16


@dataclass(frozen=True)
class TensorSpec:
    """One parameter, by its name in a HuggingFace checkpoint.

    shape: of the whole tensor. boxes: what is sent of it, without overlap; None: all of it. is_frozen: training never
    changes it, so engines that have it need it no more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...] | None = None
    is_frozen: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype; `dtype` is its name without `torch.`."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of what is sent."""
        return sum(num_numbers(box) for box in self.sent_boxes) * self.torch_dtype.itemsize

    @property
    def sent_boxes(self) -> tuple[Box, ...]:
        """The boxes, also of a whole tensor."""
        return (whole_box(self.shape),) if self.boxes is None else self.boxes


class WeightSource(Protocol):
    """A source of weights: a sharded model."""

    def specs(self) -> list[TensorSpec]:
        """Return all parameters, in the order of `gather`."""
        ...

    def gather(self) -> Iterator[Tensor]:
        """Yield each full parameter; the next one may reuse its memory. Collective: every rank iterates to the end."""
        ...


@runtime_checkable
class PartlyFrozenSource(WeightSource, Protocol):
    """A source that can leave out the parameters whose specs say that they are frozen."""

    def gather_changing(self) -> Iterator[Tensor]:
        """Yield the parameters that are not frozen, as `gather` does."""
        ...


@dataclass(frozen=True)
class Bucket:
    """Some parameters in one buffer of `num_bytes`, each at its offset."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @cached_property
    def num_sums(self) -> tuple[int, ...]:
        """How many sums of each whole tensor follow the bucket in a push that is compared; 0: nothing of it is sent."""
        return tuple(num_sums(spec.shape) if spec.sent_boxes else 0 for spec in self.specs)

    def parts(self, buffer: Tensor, index: int) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes of a parameter with their views in a uint8 buffer, each in the shape of the box."""
        spec, end = self.specs[index], self.offsets[index]
        for box in spec.sent_boxes:
            begin, end = end, end + num_numbers(box) * spec.torch_dtype.itemsize
            yield box, buffer[begin:end].view(spec.torch_dtype).view([stop - start for start, stop in box])

    def pack(self, buffer: Tensor, index: int, tensor: Tensor) -> None:
        """Copy what is sent of a whole parameter into a uint8 buffer."""
        for box, part in self.parts(buffer, index):
            part.copy_(inside(tensor, box))

    def tensors(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters in a uint8 buffer: as views, or else with NaN for what was not sent.

        They are contiguous, unless nothing of one was sent: all its numbers are one number in memory. vLLM keeps what
        it gets for a layer until the layer is complete, and most experts of other GPUs are not sent.
        """
        for index, spec in enumerate(self.specs):
            if spec.boxes is None or spec.boxes == (whole_box(spec.shape),):
                ((_, tensor),) = self.parts(buffer, index)
                yield spec.name, tensor
                continue
            if not spec.boxes:
                one = torch.full((), torch.nan, dtype=spec.torch_dtype, device=buffer.device)
                yield spec.name, one.expand(spec.shape)
                continue
            tensor = torch.full(spec.shape, torch.nan, dtype=spec.torch_dtype, device=buffer.device)
            for box, part in self.parts(buffer, index):
                inside(tensor, box).copy_(part)
            yield spec.name, tensor


def make_buckets(specs: Sequence[TensorSpec], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Fill buckets in order, each up to `bucket_bytes`; a larger tensor gets a separate bucket."""
    buckets: list[Bucket] = []
    taken: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in specs:
        if taken and end + spec.num_bytes > bucket_bytes:
            buckets.append(_bucket(taken, offsets, end))
            taken, offsets, end = [], [], 0
        taken.append(spec)
        offsets.append(end)
        end = _round_up(end + spec.num_bytes, _ALIGNMENT)
    if taken:
        buckets.append(_bucket(taken, offsets, end))
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
            tuple(
                TensorSpec(
                    spec["name"],
                    tuple(spec["shape"]),
                    spec["dtype"],
                    boxes_from_json(spec["boxes"]),
                    spec["is_frozen"],
                )
                for spec in entry["specs"]
            ),
            tuple(entry["offsets"]),
            entry["num_bytes"],
        )
        for entry in json.loads(zlib.decompress(b64decode(text)))
    ]


def boxes_from_json(boxes: list[list[list[int]]] | None) -> tuple[Box, ...] | None:
    """Return boxes that went through JSON."""
    if boxes is None:
        return None
    return tuple(tuple((start, stop) for start, stop in box) for box in boxes)


def _bucket(specs: Sequence[TensorSpec], offsets: Sequence[int], end: int) -> Bucket:
    return Bucket(tuple(specs), tuple(offsets), max(_ROW_BYTES, _round_up(end, _ROW_BYTES)))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
