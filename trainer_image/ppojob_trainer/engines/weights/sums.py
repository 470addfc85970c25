"""Sums of a tensor's bit patterns by row and by column, which show whether a box has the right numbers of it.

    [R, C]  →  R sums of rows, C sums of columns     rows 4 to 8 are right if their sums are the whole's 4 to 8

The sender computes them of whole tensors, whatever it sends, and the receiver compares them with what it got: a box of
other rows or columns, of another tensor or of older weights has other sums. Exact. Called by both ends. Pure torch.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import Tensor

from ppojob_trainer.engines.weights.boxes import Box, inside

PIECE: Final = 2**24
"""Numbers that are summed up at a time: torch sums whole numbers of 2 bytes from a copy of 8 bytes each."""

_PATTERNS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def patterns(tensor: Tensor) -> Tensor:
    """Return the numbers' bits as whole numbers, in the same shape. Copies a tensor that is not contiguous."""
    # Of one dimension: views of another dtype want the last one dense.
    return tensor.contiguous().view(-1).view(_PATTERNS[tensor.element_size()]).view(tensor.shape)


def num_sums(shape: tuple[int, ...]) -> int:
    """Return how many sums a tensor has. Without a second dim, each number is its own."""
    return prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def sums_of(tensor: Tensor) -> Tensor:
    """Return the sums of each matrix [..., R, C] of a tensor: those of all rows, then those of all columns; int64."""
    if tensor.ndim < 2:
        return patterns(tensor).reshape(-1).to(torch.int64)
    matrices = patterns(tensor).view(-1, *tensor.shape[-2:])
    of_rows, of_columns = [], []
    for some in torch.split(matrices, max(1, PIECE // max(1, prod(tensor.shape[-2:])))):
        pieces = torch.split(some, max(1, PIECE // max(1, tensor.shape[-1])), dim=1)
        of_rows.append(torch.cat([piece.sum(-1, dtype=torch.int64) for piece in pieces], 1).reshape(-1))
        of_columns.append(torch.stack([piece.sum(-2, dtype=torch.int64) for piece in pieces]).sum(0).reshape(-1))
    return torch.cat([*of_rows, *of_columns])


def agree(part: Tensor, box: Box, shape: tuple[int, ...], sums: Tensor) -> Tensor | None:
    """Return whether a box has the numbers of a whole tensor, as a scalar on the device.

    None: the box has only some rows and only some columns of a matrix, so nothing can be said.

    Args:
        part: the numbers of the box.
        shape: of the whole tensor.
        sums: those of the whole tensor.
    """
    if part.numel() == 0:
        return torch.tensor(True, device=part.device)
    own = sums_of(part)
    if len(shape) < 2:
        return (own == inside(sums.view(shape), box).reshape(-1)).all()
    num_rows, own_rows = prod(shape[:-1]), prod(part.shape[:-1])
    if part.shape[-1] == shape[-1]:
        return (own[:own_rows] == inside(sums[:num_rows].view(shape[:-1]), box[:-1]).reshape(-1)).all()
    of_columns = sums[num_rows:].view(*shape[:-2], shape[-1])
    if part.shape[-2] == shape[-2]:
        return (own[own_rows:] == inside(of_columns, (*box[:-2], box[-1])).reshape(-1)).all()
    return None
