"""Importance weights of responses that another policy generated than the one that is trained.

The other policy is that of the rollout engine: of older weights (`schedule.mode: OneStepOff`), or of the same weights
computed with other kernels or in another precision. Called by the policy's objective, which multiplies the advantages
by the weights. So every loss that is proportional to the advantages is corrected without knowing about it.

Three policies take part, as in the decoupled objective of PPO (Hilton et al. 2022, arXiv 2110.00641, section 3; AReaL,
Fu et al. 2025, arXiv 2505.24298, section 5.2): pi_engine generated the token, pi_old is the trainer's at the start of
the step, and pi is being updated. The objective is w * min(u A, clip(u, 1 - low, 1 + high) A), with u = pi / pi_old and
w = pi_old / pi_engine without a gradient. The clipping stays around pi_old, and w alone corrects the expectation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ppojob_trainer.maths.kl import MAX_LOG_RATIO
from ppojob_trainer.maths.losses import Denominators
from ppojob_trainer.maths.masked import masked_sum

__all__ = ["SQUARES", "WEIGHTS", "Bounds", "correction_metrics", "effective_share", "importance_weights"]

WEIGHTS: Final = "rollout_is_mean"
SQUARES: Final = "rollout_is_square"
"""Share of the mean square of the weights, from which the effective sample size is computed."""


@dataclass(frozen=True)
class Bounds:
    """What happens to the weights.

    is_of_sequence: a response has one weight, the product of those of its tokens. upper: largest weight. lower: None:
    larger weights become `upper`; else weights outside of [lower, upper] become 0.
    """

    is_of_sequence: bool = False
    upper: float = 2.0
    lower: float | None = None


def importance_weights(old_log_prob: Tensor, engine_log_prob: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """Return the weight of each token, float32 [B, R], 0 where the mask is 0.

    w = exp(old_log_prob - engine_log_prob), for a sequence exp of the sum over its tokens, then
    truncated: min(w, upper) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    truncated importance sampling; Ionides 2008, section 2), or
    masked: w where lower <= w <= upper, else 0 (IcePop: Ring-1T 2025, arXiv 2510.18855, the function M of its
    objective). Before exp, the exponent is clamped to +-20.

    Args:
        old_log_prob, engine_log_prob: float32 [B, R]; mask: [B, R]. A row is a whole response.
    """
    ratio = _ratio(old_log_prob, engine_log_prob, mask, bounds)
    if bounds.lower is None:
        return ratio.clamp(max=bounds.upper) * mask
    return torch.where(_is_inside(ratio, bounds), ratio, torch.zeros_like(ratio)) * mask


@torch.no_grad()
def correction_metrics(
    old_log_prob: Tensor, engine_log_prob: Tensor, mask: Tensor, bounds: Bounds, denominators: Denominators
) -> dict[str, Tensor]:
    """Return shares of token means, under verl's names; see `losses` for shares.

    rollout_is_mean: of the weights. rollout_is_square: of their squares. rollout_is_ratio_fraction_high: tokens whose
    ratio is above `upper`. rollout_is_ratio_fraction_low: below `lower`, if there is one. kl: KL(engine || trainer) by
    K1; k3_kl: by K3, which is never negative (Schulman 2020; the samples are the engine's).
    """
    weights = importance_weights(old_log_prob, engine_log_prob, mask, bounds)
    ratio = _ratio(old_log_prob, engine_log_prob, mask, bounds)
    log_ratio = _clamped(old_log_prob - engine_log_prob)
    means = {
        WEIGHTS: weights,
        SQUARES: weights.square(),
        "rollout_is_ratio_fraction_high": (ratio > bounds.upper).float(),
        "kl": engine_log_prob - old_log_prob,
        "k3_kl": log_ratio.exp() - log_ratio - 1,
    }
    if bounds.lower is not None:
        means["rollout_is_ratio_fraction_low"] = (ratio < bounds.lower).float()
    return {name: masked_sum(values, mask) / max(denominators.tokens, 1.0) for name, values in means.items()}


def effective_share(mean: float, square: float) -> float:
    """Return the effective sample size as a share of the tokens: mean(w)^2 / mean(w^2) (Kong 1992); 0 if all are 0."""
    return mean * mean / square if square else 0.0


def _ratio(old_log_prob: Tensor, engine_log_prob: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    # Where the mask is 0, an engine may have reported anything, -inf included.
    log_ratio = torch.where(mask.bool(), old_log_prob - engine_log_prob, torch.zeros_like(old_log_prob))
    if bounds.is_of_sequence:
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    return _clamped(log_ratio).exp()


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _is_inside(ratio: Tensor, bounds: Bounds) -> Tensor:
    assert bounds.lower is not None, "only masking has a lower bound"
    return (ratio >= bounds.lower) & (ratio <= bounds.upper)
