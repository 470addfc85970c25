"""Means, variances and whitening over the entries that a mask selects.

Whitening goes through `Moments` (count, sum, sum of squares), which add up: ranks all-reduce `Moments.to_tensor()`
and all of them whiten with the moments of the whole batch. Called by the losses, the advantages and the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is not 0. NaN and infinity outside the mask do not reach the sum."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is not 0; 0 where the mask selects nothing."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim=dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of `values` where `mask` is not 0, with Bessel's correction n / (n - 1) if `unbiased`.

    0 for a single entry, where the unbiased variance is not defined.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean).square(), mask)
    if not unbiased:
        return variance
    count = mask.bool().sum()
    return variance * count / (count - 1).clamp(min=1)


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares: everything that whitening needs, and it adds up over ranks."""

    count: float
    total: float
    total_of_squares: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Moments of `values` where `mask` is not 0, summed in float64."""
        wide = values.detach().double()
        return cls(
            count=float(mask.bool().sum()),
            total=float(masked_sum(wide, mask)),
            total_of_squares=float(masked_sum(wide.square(), mask)),
        )

    def to_tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return float64 [3], to be summed over ranks (all-reduce)."""
        return torch.tensor([self.count, self.total, self.total_of_squares], dtype=torch.float64, device=device)

    @classmethod
    def from_tensor(cls, summed: Tensor) -> Moments:
        """Undo `to_tensor`."""
        count, total, total_of_squares = summed.tolist()
        return cls(count, total, total_of_squares)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.total_of_squares + other.total_of_squares
        )

    @property
    def mean(self) -> float:
        """The mean; 0 of nothing."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """The unbiased variance; 0 for fewer than two entries."""
        if self.count < 2:
            return 0.0
        # Rounding can leave a tiny negative number where all entries are equal.
        return max(0.0, (self.total_of_squares - self.count * self.mean**2) / (self.count - 1))


def whiten(values: Tensor, mask: Tensor, moments: Moments, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Return (values - mean) / sqrt(variance + epsilon) where `mask` is not 0, and 0 elsewhere.

    Args:
        moments: of the whole batch over all ranks, so that the result does not depend on how it is sharded.
        shift_mean: False adds the mean back (PPO on rewards that must keep their level).
    """
    whitened = (values - moments.mean) * (moments.variance + epsilon) ** -0.5
    if not shift_mean:
        whitened = whitened + moments.mean
    return torch.where(mask.bool(), whitened, torch.zeros_like(whitened))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Whiten with the moments of these values alone: for one process, and for tests of the sharded form."""
    return whiten(values, mask, Moments.of(values, mask), shift_mean)


def explained_variance(returns: Moments, residuals: Moments) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows only the mean.

    Args:
        returns: moments of the returns.
        residuals: moments of returns minus values.

    0 where the returns do not vary, as there is nothing to explain.
    """
    return 1.0 - residuals.variance / returns.variance if returns.variance > 0 else 0.0
