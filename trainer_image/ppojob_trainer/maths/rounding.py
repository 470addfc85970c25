"""Stochastic rounding of float32 to bfloat16 (Gupta et al. 2015, arXiv 1502.02551, section 3).

bfloat16 keeps 8 of the 24 bits of a number. A change that is much smaller than the last of them is lost if each number
becomes the nearest one. Here a number x between two neighbours a < b becomes b with probability (x - a) / (b - a), so a
change of many numbers is kept on average:

    x        1.0010 1.0010 1.0010 1.0010 ...      neighbours 1 and 1.0078
    nearest  1      1      1      1      ...      mean 1
    here     1      1      1.0078 1      ...      mean 1.0010

The random numbers are a hash of a number's place. So equal inputs give equal bytes in each process and on each device,
and a number that does not change is rounded as before.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["round_stochastically"]

_DROPPED_BITS: Final = 16
_PERIOD: Final = 1_048_573
"""Places after which the random numbers repeat: a prime, so that each row of a matrix has others. So many numbers are
rounded at a time, which bounds the memory."""


def round_stochastically(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in `dtype`, of the same shape; for another dtype than bfloat16, the nearest ones.

    What bfloat16 has stays as it is, infinities and NaN included.

    Args:
        values: float32.
    """
    if dtype is not torch.bfloat16:
        return values.to(dtype)
    flat = values.contiguous().view(-1)
    random, found = _random(values.device), torch.empty_like(flat, dtype=torch.bfloat16)
    for given, rounded in zip(flat.split(_PERIOD), found.split(_PERIOD), strict=True):
        # The bits of a float32 are ordered by its size, so a carry into the kept bits gives the next bfloat16. A carry
        # out of a NaN would give a number.
        added = torch.where(given.isfinite(), random[: len(given)], 0)
        rounded.copy_(((given.view(torch.int32) + added) >> _DROPPED_BITS).to(torch.int16).view(torch.bfloat16))
    return found.view(values.shape)


def _random(device: torch.device) -> Tensor:
    """Return evenly distributed integers of the dropped bits, int32 [_PERIOD]: Wellons' hash `lowbias32` of places."""
    found = torch.arange(_PERIOD, dtype=torch.int32, device=device)
    found ^= (found >> 16) & 0xFFFF
    found *= 0x7FEB352D
    found ^= (found >> 15) & 0x1FFFF
    found *= 0x846CA68B - 2**32
    found ^= (found >> 16) & 0xFFFF
    return found & 0xFFFF
