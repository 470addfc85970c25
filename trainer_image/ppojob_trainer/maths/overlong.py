"""DAPO's soft punishment of overlong responses. Called before advantages are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Overlong:
    """The penalty of a response by its length in tokens (Yu et al. 2025, arXiv 2503.14476, equation 13).

    0 up to max_length - buffer tokens, then it grows to `factor` at max_length; the paper's factor is 1.
    """

    max_length: int
    buffer: int
    factor: float = 1.0

    def penalized(self, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract the penalty from the reward of the last token of each response.

        Args:
            rewards: float32 [B, R].
            mask: [B, R], 1 on tokens that the policy wrote. A row without any is not penalized.

        Returns:
            Rewards, float32 [B, R], and the penalties, float32 [B], 0 or above.
        """
        lengths = mask.bool().sum(dim=1)
        exceeding = (lengths - (self.max_length - self.buffer)).clamp(min=0)
        penalty = exceeding.to(rewards.dtype) / self.buffer * self.factor
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask.bool(), columns, -1).max(dim=1).values
        is_last = (columns == last.unsqueeze(1)) & mask.bool()
        return rewards - torch.where(is_last, penalty.unsqueeze(1), torch.zeros_like(rewards)), penalty
