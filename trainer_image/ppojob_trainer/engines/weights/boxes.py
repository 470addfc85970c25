"""Boxes: the part of a tensor that an engine's GPU needs, as a range in each dim.

    [E, 2F, H] fused experts, second of two GPUs     ((0, E), (F/2, F), (0, H)) and ((0, E), (3F/2, 2F), (0, H))
    [V, H] embedding                                  ((V/2, V), (0, H))

Called by the weight transfer and by the rollout's `loader_reads`. Pure torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, groupby
from math import prod
from typing import TypeAlias

from torch import Tensor

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) in each dim of a whole tensor."""


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, length) for length in shape)


def num_numbers(box: Box) -> int:
    """Return how many numbers are in a box."""
    return prod(stop - start for start, stop in box)


def inside(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box in a whole tensor; its shape is that of the box."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def box_of(view: Tensor, shape: Sequence[int], offset: int) -> Box | None:
    """Return the box that a view of a contiguous tensor covers, or None if it is none.

    Dims are recognised by their strides, so the view may be transposed, or lack dims of which it has one index.

    Args:
        view: with at least one number.
        shape: of the whole tensor.
        offset: numbers from the tensor's beginning to the view's.
    """
    if offset == 0 and view.is_contiguous() and view.numel() == prod(shape):
        return whole_box(shape)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    lengths = [1] * len(shape)
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            continue
        fitting = [
            dim
            for dim, of_whole in enumerate(strides)
            if of_whole == stride and lengths[dim] == 1 and length <= shape[dim]
        ]
        if not fitting:
            return None
        lengths[fitting[0]] = length
    starts = []
    for stride in strides:
        start, offset = divmod(offset, stride)
        starts.append(start)
    box = tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))
    return box if all(stop <= length for (_, stop), length in zip(box, shape, strict=True)) else None


def merged(boxes: Iterable[Box]) -> tuple[Box, ...] | None:
    """Join boxes that touch; return them in order, or None if some overlap."""
    found = set(boxes)
    for dim in range(len(next(iter(found), ()))):
        found = _joined(found, dim)
    return tuple(sorted(found)) if not any(_overlap(*pair) for pair in combinations(found, 2)) else None


def _joined(boxes: set[Box], dim: int) -> set[Box]:
    """Join the boxes that touch in a dim and are equal in the others."""
    joined: set[Box] = set()
    in_order = sorted(boxes, key=lambda box: (_without(box, dim), box[dim]))
    for _, group in groupby(in_order, key=lambda box: _without(box, dim)):
        first, *others = group
        for box in others:
            if first[dim][1] == box[dim][0]:
                first = (*first[:dim], (first[dim][0], box[dim][1]), *first[dim + 1 :])
                continue
            joined.add(first)
            first = box
        joined.add(first)
    return joined


def _without(box: Box, dim: int) -> Box:
    return box[:dim] + box[dim + 1 :]


def _overlap(left: Box, right: Box) -> bool:
    return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(left, right, strict=True))
