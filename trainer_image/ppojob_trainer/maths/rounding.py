"""Stochastic rounding of float32 to bfloat16 (Gupta et al. 2015, arXiv 1502.02551, section 3).

bfloat16 keeps 8 of the 24 bits of a number. A change that is much smaller than the last of them is lost if each number
becomes the nearest one. Here a number x between two neighbours a < b becomes b with probability (x - a) / (b - a), so a
change of many numbers is kept on average:

    x        1.0010 1.0010 1.0010 1.0010 ...      neighbours 1 and 1.0078
    nearest  1      1      1      1      ...      mean 1
    here     1      1      1.0078 1      ...      mean 1.0010

The random numbers are a hash of the bits of x. So a number gives the same bits each time, in each process and on each
device, wherever it stands and whatever is beside it. Plain operations of single numbers: torch.compile makes one kernel
of them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["round_each", "round_stochastically"]

_DROPPED_BITS: Final = 16
_AT_A_TIME: Final = 2**24
"""So many numbers are rounded at a time, which bounds the memory."""


def round_stochastically(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in `dtype`, of the same shape; for another dtype than bfloat16, the nearest ones.

    Numbers that bfloat16 can represent do not change.

    Args:
        values: float32.
    """
    if dtype is not torch.bfloat16:
        return values.to(dtype)
    flat = values.reshape(-1)
    found = torch.empty_like(flat, dtype=torch.bfloat16)
    for given, rounded in zip(torch.split(flat, _AT_A_TIME), torch.split(found, _AT_A_TIME), strict=True):
        rounded.copy_(round_each(given))
    return found.view(values.shape)


def round_each(values: Tensor) -> Tensor:
    """Return float32 values as `round_stochastically` does, in bfloat16, with all of its memory at a time."""
    bits = values.view(torch.int32)
    # The bits of a float32 are ordered by its size, so a carry into the kept bits gives the next bfloat16.
    rounded = ((bits + _hash(bits)) >> _DROPPED_BITS).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.bfloat16())


def _hash(bits: Tensor) -> Tensor:
    """Return evenly distributed integers of the dropped bits, int32: Wellons' hash `lowbias32`."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * (0x846CA68B - 2**32)
    return (bits ^ (bits >> 16)) & 0xFFFF
