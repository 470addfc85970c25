"""The distance between policy and reference: estimators per token, the penalty in the reward, and its coefficient.

Called by the group that computes advantages (KL in the reward) and by the policy's objective (KL in the loss). The
controllers hold the only state of this package, two numbers, and give it away by `state_dict` for the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ppojob_trainer.maths.masked import masked_mean

# exp(20) = 4.9e8 is finite in float32 and its square is too; a larger log-ratio is a mistake, not information.
MAX_LOG_RATIO: Final = 20.0
# verl's bound of k3: beyond it the estimator is dominated by single tokens.
MAX_K3: Final = 10.0


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    negative = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (negative.exp() - negative - 1).clamp(-MAX_K3, MAX_K3)


KL_ESTIMATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"K1": _k1, "K2": _k2, "K3": _k3, "Abs": torch.abs}


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token from samples of the policy, in nats.

    With r = ref_prob / prob for the sampled token (J. Schulman, "Approximating KL Divergence", 2020):
    K1 = -log r (unbiased, may be negative), K2 = (log r)^2 / 2 (biased, low variance), K3 = (r - 1) - log r
    (unbiased, never negative; clamped to +-10), Abs = |log r|.

    Args:
        log_prob, ref_log_prob: float, same shape, any shape.
        estimator: a key of `KL_ESTIMATORS`.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}: choose one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](log_prob - ref_log_prob)


def penalize_rewards(scores: Tensor, kl: Tensor, mask: Tensor, coefficient: float) -> tuple[Tensor, Tensor]:
    """Return the rewards with the KL penalty, and each sequence's mean KL.

    r_t = score_t - coefficient * KL_t (Ziegler et al. 2019, equation 2, token by token as in InstructGPT).

    Args:
        scores, kl: float32 [B, R].
        mask: [B, R], 1 on response tokens.

    Returns:
        rewards float32 [B, R], 0 outside the mask; mean KL per sequence float32 [B], whose mean over all ranks is
        what the controller is updated with.
    """
    rewards = torch.where(mask.bool(), scores - coefficient * kl, torch.zeros_like(scores))
    return rewards, masked_mean(kl, mask, dim=-1)


class KLController(Protocol):
    """The coefficient of the KL penalty in the reward, and how it moves."""

    @property
    def coefficient(self) -> float:
        """The coefficient now in force."""
        ...

    def update(self, current_kl: float, num_samples: int) -> None:
        """Take note of a batch: its mean KL in nats, and its number of sequences."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        ...


@dataclass
class FixedKLController:
    """A coefficient that stays."""

    coefficient: float

    def update(self, current_kl: float, num_samples: int) -> None:
        """Nothing moves."""

    def state_dict(self) -> dict[str, Any]:
        """The type alone: the coefficient comes from the configuration, which may change with a restart."""
        return {"type": "Fixed"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the type; there is nothing else to load."""
        _check_state(state, "Fixed")


@dataclass
class AdaptiveKLController:
    """A proportional controller in log-space (Ziegler et al. 2019, section 2.2).

    e = clip(KL / target - 1, -0.2, 0.2); coefficient <- coefficient * (1 + e * num_samples / horizon).
    """

    coefficient: float
    target: float
    horizon: int

    def update(self, current_kl: float, num_samples: int) -> None:
        """Move the coefficient towards holding the target."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """The coefficient reached; target and horizon come from the configuration."""
        return {"type": "Adaptive", "coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the saved coefficient."""
        _check_state(state, "Adaptive")
        self.coefficient = float(state["coefficient"])


def make_kl_controller(kind: str, coefficient: float, target: float = 0.1, horizon: int = 10_000) -> KLController:
    """Return the controller of type `Fixed` or `Adaptive` (target in nats, horizon in sequences).

    Raises:
        ValueError: another type, or a target or horizon that is not positive.
    """
    if kind == "Fixed":
        return FixedKLController(coefficient)
    if kind != "Adaptive":
        raise ValueError(f"unknown KL controller {kind!r}: choose Fixed or Adaptive")
    if target <= 0 or horizon <= 0:
        raise ValueError(f"an adaptive KL controller needs target > 0 and horizon > 0, got {target} and {horizon}")
    return AdaptiveKLController(coefficient, target, horizon)


def _check_state(state: dict[str, Any], kind: str) -> None:
    if state.get("type") != kind:
        raise ValueError(
            f"the checkpoint's KL controller is {state.get('type')!r}, the configuration asks for {kind!r}: "
            "keep algorithm.kl.controller.type when resuming"
        )
