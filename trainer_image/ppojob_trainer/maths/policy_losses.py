"""Policy losses by name: the loss of each token, from log-probs and advantages. `losses.policy_loss` aggregates it.

A loss here neither reads a denominator nor aggregates, so a new one cannot depend on micro-batches or ranks. Rows are
whole responses, with sequence parallelism too. Called through `losses.policy_loss`; a user's own loss has the same
form (`ppojob_trainer.algorithms`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ppojob_trainer.maths.kl import MAX_LOG_RATIO
from ppojob_trainer.maths.masked import masked_mean

MAX_SEQUENCE_LOG_RATIO: Final = 10.0
"""Bound of GSPO's log-ratio, which is a mean over tokens; verl's."""


@dataclass(frozen=True)
class Clipping:
    """Bounds of the ratio: [1 - low, 1 + high], and `dual` where the advantage is negative (PPO alone reads it)."""

    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss reads, of some whole responses of a minibatch, on the device that computes.

    log_prob: float32 [B, R], of the policy that is updated, with gradient. 0 where the mask is 0.
    old_log_prob: float32 [B, R], of the policy at the start of the step; without gradient.
    advantages: float32 [B, R].
    mask: [B, R], 1 on tokens that the policy wrote. What a loss returns elsewhere is ignored.
    clipping: actor.clipRatioLow, clipRatioHigh and clipRatioDual.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    clipping: Clipping = Clipping()

    @property
    def log_ratio(self) -> Tensor:
        """log_prob - old_log_prob, within +-20; float32 [B, R] with gradient."""
        return torch.clamp(self.log_prob - self.old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)


TokenLosses = tuple[Tensor, Mapping[str, Tensor]]
"""The loss of each token, float32 [B, R], to be minimised; and metrics by name, [B, R] each, of which the mean over
tokens is reported."""
PolicyLoss = Callable[[PolicyLossInputs], TokenLosses]


def ppo(inputs: PolicyLossInputs) -> TokenLosses:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, equation 7) with dual clip.

    ratio = exp(log_ratio); loss = max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)); where A < 0 also
    min(loss, -A * dual) (Ye et al. 2019, arXiv 1912.09729, equation 5: bounds the loss where a bad action became
    likely). A larger `high` than `low` is DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476, equation 10).
    """
    clipping, advantages = inputs.clipping, inputs.advantages
    ratio = inputs.log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clipping.low, 1 + clipping.high)
    pessimistic = torch.maximum(plain, clipped)
    bounded = torch.minimum(pessimistic, -advantages * clipping.dual)
    negative = advantages < 0
    lower = (pessimistic > -advantages * clipping.dual) & negative
    return torch.where(negative, bounded, pessimistic), {
        "pg_clipfrac": clipped > plain,
        "pg_clipfrac_lower": lower,
    }


def gspo(inputs: PolicyLossInputs) -> TokenLosses:
    """GSPO: the ratio of a whole response (Zheng et al. 2025, arXiv 2507.18071, equations 5, 7 and 14).

    s_i = exp(mean over the response's tokens of log_prob - old_log_prob), at most e^10; loss = max(-A * s,
    -A * clip(s, 1 - low, 1 + high)). The value of s is the same for all tokens of a response, and its gradient flows
    through each token's own log-prob (equation 14, GSPO-token), as in verl; so advantages may differ by token. The
    paper's bounds are 3e-4 and 4e-4, and its mean is over responses: actor.lossAggregation SeqMeanTokenMean.
    """
    clipping, advantages = inputs.clipping, inputs.advantages
    mean_B1 = masked_mean(inputs.log_prob - inputs.old_log_prob, inputs.mask, dim=-1).detach().unsqueeze(-1)
    log_ratio = inputs.log_prob - inputs.log_prob.detach() + mean_B1
    ratio = log_ratio.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clipping.low, 1 + clipping.high)
    return torch.maximum(plain, clipped), {"pg_clipfrac": clipped > plain}


def cispo(inputs: PolicyLossInputs) -> TokenLosses:
    """CISPO: the clipped ratio is a weight without gradient (MiniMax 2025, arXiv 2506.13585, equations 4 and 5).

    loss = -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * log_prob. So no token's gradient is lost by clipping.
    The paper has no lower bound, which is actor.clipRatioLow 1.
    """
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(1 - inputs.clipping.low, 1 + inputs.clipping.high)
    return -weight * inputs.advantages * inputs.log_prob, {"pg_clipfrac": ratio != weight}


POLICY_LOSSES: Final[Mapping[str, PolicyLoss]] = {"PPO": ppo, "GSPO": gspo, "CISPO": cispo}
