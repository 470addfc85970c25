"""What a training engine minimises: PPO's loss of the policy, or the loss of the values; and an update's metrics.

An engine calls `loss` for each micro-batch and `metrics` at the end of an update. Nothing here depends on how a model
is divided or stored, so every engine trains on the same numbers.

Suffixes: b sequences of a micro-batch, R data.maxResponseLength.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec, CorrectionLevel, CorrectionMethod, RolloutCorrection
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec, LossAggregation
from ppojob_trainer.algorithms import policy_loss_of
from ppojob_trainer.maths.importance import (
    SQUARES,
    WEIGHTS,
    Bounds,
    correction_metrics,
    effective_share,
    importance_weights,
)
from ppojob_trainer.maths.kl import kl_estimate
from ppojob_trainer.maths.losses import Denominators, Loss, aggregate, entropy_bonus, kl_loss, policy_loss, value_loss
from ppojob_trainer.maths.masked import Moments, explained_variance
from ppojob_trainer.maths.policy_losses import Clipping, PolicyLossInputs
from ppojob_trainer.protocol import DataProto, Keys

__all__ = ["Objective", "PolicyObjective", "Ranks", "UpdateResult", "ValueObjective"]

_CORRECTION = "rollout_corr"
"""Group of the correction's metrics, as in verl."""
_PROBS_DIFF = "training/probs_diff"
"""Name of a share: the token mean of |exp(old log-prob) - exp(log-prob)|."""


@dataclass
class UpdateResult:
    """The result of an update, over all ranks.

    shares: for each metric of the loss the sum over the optimizer steps. first_shares: those of the first step, which
    computes with the weights before the update; empty if the engine does not keep them. grad_norms: of every step
    before clipping, skipped ones too. num_tokens, num_policy_tokens, num_token_pairs: sums over all passes of the
    sequences' lengths, of their response_mask, and of their squared lengths, for the count of operations. mfu: the
    share of the accelerators' peak that the update used, None if it is unknown.
    """

    num_steps: int
    num_skipped: int
    learning_rate: float
    shares: dict[str, float] = field(default_factory=dict)
    first_shares: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: float = 0.0
    num_policy_tokens: float = 0.0
    num_token_pairs: float = 0.0
    seconds: float = 0.0
    mfu: float | None = None

    def mean(self, name: str) -> float:
        """Mean over the optimizer steps."""
        return self.shares[name] / self.num_steps


class Ranks(Protocol):
    """Sums over the data-parallel ranks, such as those of a `ParallelMesh`."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks of a small tensor on the CPU. Collective."""
        ...


class Objective(Protocol):
    """What an engine minimises."""

    def columns(self, batch: DataProto) -> list[str]:
        """Return the columns of this batch that `loss` reads."""
        ...

    def loss(self, outputs: tuple[Tensor, ...], fields: Mapping[str, Tensor], denominators: Denominators) -> Loss:
        """Return a micro-batch's share of the minibatch's loss, float32 [] with a gradient; and the metrics' shares.

        Args:
            outputs: of the model, float32 [b, R] each, 0 where response_mask is False. A policy's are log-probs and
                entropies at the batch's temperature, a value model's are the values.
            fields: the `columns`, [b, R]; response_mask is int64.
            denominators: of the minibatch over all ranks.
        """
        ...

    def metrics(self, batch: DataProto, result: UpdateResult, ranks: Ranks) -> dict[str, float]:
        """Return an update's metrics by their names in the metrics file, equal on all ranks. Collective.

        Args:
            batch: this rank's rows of the update.
        """
        ...


class PolicyObjective:
    """PPO's loss, or another policy loss of the spec, with entropy bonus, KL and the correction of the rollout."""

    def __init__(self, training: ActorSpec, algorithm: AlgorithmSpec) -> None:
        """`algorithm`: of it, the policy loss, the KL in the loss and the correction of the rollout.

        Raises:
            AlgorithmFunctionError: the user's policy loss cannot be loaded. `loss` raises it for a wrong result.
        """
        self.training, self.kl = training, algorithm.kl
        self._compute_policy_loss = policy_loss_of(algorithm)
        self._bounds = _bounds_of(algorithm.correction)
        self._is_compared = not algorithm.bypasses_old_log_probs

    def columns(self, batch: DataProto) -> list[str]:
        """See `Objective`. Without old_log_probs, the policy has not changed since the batch was generated."""
        columns = [Keys.RESPONSE_MASK, Keys.ADVANTAGES]
        if Keys.OLD_LOG_PROBS in batch:
            columns.append(Keys.OLD_LOG_PROBS)
        if self.kl.in_loss:
            columns.append(Keys.REF_LOG_PROB)
        if self._bounds is not None:
            columns.append(Keys.ROLLOUT_LOG_PROBS)
        return columns

    def loss(self, outputs: tuple[Tensor, ...], fields: Mapping[str, Tensor], denominators: Denominators) -> Loss:
        """See `Objective`."""
        log_prob, entropy = outputs
        training = self.training
        mask, aggregation = fields[Keys.RESPONSE_MASK], training.loss_aggregation.value
        clipping = Clipping(training.clip_ratio_low, training.clip_ratio_high, training.clip_ratio_dual)
        # Without old_log_probs this is the only update on the batch, so the current log-probs are used instead.
        old_log_prob, advantages = fields.get(Keys.OLD_LOG_PROBS, log_prob.detach()), fields[Keys.ADVANTAGES]
        corrections: dict[str, Tensor] = {}
        if self._bounds is not None:
            pair = (old_log_prob, fields[Keys.ROLLOUT_LOG_PROBS], mask)
            advantages = advantages * importance_weights(*pair, self._bounds)
            corrections = correction_metrics(*pair, self._bounds, denominators)
        inputs = PolicyLossInputs(log_prob, old_log_prob, advantages, mask, clipping)
        loss, metrics = policy_loss(inputs, denominators, self._compute_policy_loss, aggregation)
        metrics |= {f"{_CORRECTION}/{name}": share for name, share in corrections.items()}
        with torch.no_grad():
            difference = (old_log_prob.exp() - log_prob.exp()).abs()
            metrics[_PROBS_DIFF] = aggregate(difference, mask, LossAggregation.TOKEN_MEAN.value, denominators)
        if training.entropy_coefficient == 0:
            entropy = entropy.detach()
        bonus, shares = entropy_bonus(entropy, mask, denominators, training.entropy_coefficient, aggregation)
        loss, metrics = loss + bonus, metrics | shares
        if self.kl.in_loss:
            estimate = kl_estimate(log_prob, fields[Keys.REF_LOG_PROB], self.kl.loss_estimator.value)
            penalty, shares = kl_loss(estimate, mask, denominators, self.kl.loss_coefficient, aggregation)
            loss, metrics = loss + penalty, metrics | shares
        return loss, metrics

    def metrics(self, batch: DataProto, result: UpdateResult, ranks: Ranks) -> dict[str, float]:
        """See `Objective`. The first step has the weights of old_log_probs, unless the engine computed these."""
        metrics = {
            name if name.startswith(_CORRECTION) else f"actor/{name}": result.mean(name)
            for name in result.shares
            if name != _PROBS_DIFF
        }
        if self._is_compared and Keys.OLD_LOG_PROBS in batch and _PROBS_DIFF in result.first_shares:
            metrics["training/update_probs_diff_mean"] = result.first_shares[_PROBS_DIFF]
        if self._bounds is not None:
            square = metrics.pop(f"{_CORRECTION}/{SQUARES}")
            size = effective_share(metrics[f"{_CORRECTION}/{WEIGHTS}"], square)
            metrics[f"{_CORRECTION}/rollout_is_eff_sample_size"] = size
        if self.kl.in_loss:
            metrics["actor/kl_coef"] = self.kl.loss_coefficient
        return metrics | _step_metrics("actor", result)


class ValueObjective:
    """The clipped loss of the values."""

    def __init__(self, training: CriticSpec) -> None:
        self.training = training

    def columns(self, batch: DataProto) -> list[str]:
        """See `Objective`."""
        return [Keys.RESPONSE_MASK, Keys.VALUES, Keys.RETURNS]

    def loss(self, outputs: tuple[Tensor, ...], fields: Mapping[str, Tensor], denominators: Denominators) -> Loss:
        """See `Objective`."""
        (values,) = outputs
        return value_loss(
            values,
            fields[Keys.VALUES],
            fields[Keys.RETURNS],
            fields[Keys.RESPONSE_MASK],
            denominators,
            self.training.clip_range_value,
            self.training.loss_aggregation.value,
        )

    def metrics(self, batch: DataProto, result: UpdateResult, ranks: Ranks) -> dict[str, float]:
        """See `Objective`. The explained variance is that of the values before the update."""
        returns, mask = batch.ragged(Keys.RETURNS).values, batch.ragged(Keys.RESPONSE_MASK).values
        residuals = returns - batch.ragged(Keys.VALUES).values
        both = torch.stack([Moments.of(returns, mask).to_tensor(), Moments.of(residuals, mask).to_tensor()])
        summed = ranks.sum(both)
        explained = explained_variance(Moments.from_tensor(summed[0]), Moments.from_tensor(summed[1]))
        metrics = {f"critic/{name}": result.mean(name) for name in result.shares}
        return {**metrics, "critic/vf_explained_var": explained, **_step_metrics("critic", result)}


def _step_metrics(role: str, result: UpdateResult) -> dict[str, float]:
    """Return the metrics that are common to actor and critic."""
    finite = [norm for norm in result.grad_norms if math.isfinite(norm)]
    metrics = {
        f"{role}/grad_norm": sum(finite) / len(finite) if finite else float("nan"),
        f"{role}/grad_norm_max": max(finite, default=float("nan")),
        f"{role}/lr": result.learning_rate,
        f"{role}/non_finite_steps": float(result.num_skipped),
    }
    if result.mfu is not None:
        metrics[f"perf/mfu/{role}"] = result.mfu
    return metrics


def _bounds_of(correction: RolloutCorrection | None) -> Bounds | None:
    if correction is None:
        return None
    lower = correction.lower_bound if correction.method is CorrectionMethod.MASK else None
    return Bounds(correction.level is CorrectionLevel.SEQUENCE, correction.upper, lower)
