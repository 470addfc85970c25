"""Advantages, on the ranks of the critic's group (or the actor's, if there is no critic).

Each rank has some rows; sums over ranks make whitening and statistics those of the whole batch. Called by the workers
of both roles. It has no state and changes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.algorithms import AdvantageInputs, estimator_of
from ppojob_trainer.maths.kl import kl_estimate, penalize_rewards
from ppojob_trainer.maths.masked import Moments, whiten
from ppojob_trainer.maths.overlong import Overlong
from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.rewards import RewardFunctionError

__all__ = ["Ranks", "compute_advantages", "overlong_of", "statistics"]


class Ranks(Protocol):
    """Sums over the ranks that hold the batch together."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks. Collective."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Return the largest over ranks. Collective."""
        ...


def overlong_of(spec: PPOJobSpec) -> Overlong | None:
    """Return the penalty of overlong responses, if the job has one."""
    penalty = spec.reward.overlong_penalty
    return None if penalty is None else Overlong(spec.data.max_response_length, penalty.buffer, penalty.factor)


def compute_advantages(
    batch: DataProto, algorithm: AlgorithmSpec, kl_coefficient: float, ranks: Ranks, overlong: Overlong | None = None
) -> DataProto:
    """Return advantages and returns [B, R]; the statistics are in meta_info. Collective.

    Args:
        batch: needs response_mask, token_level_scores, and the fields of the estimator: values, uid; with KL in the
            reward old_log_probs and ref_log_prob. Rows whose mask is 0 are copies or were dropped, and do not count.
        kl_coefficient: of the KL penalty in the reward.
        overlong: what is subtracted from the scores of overlong responses.

    Raises:
        AlgorithmFunctionError: the user's estimator cannot be loaded or returned something wrong.
        RewardFunctionError: the reward dropped all responses.
    """
    mask = batch.tensor(Keys.RESPONSE_MASK)
    scores = batch.tensor(Keys.TOKEN_LEVEL_SCORES)
    is_row = mask.bool().any(dim=1)
    if not float(ranks.sum(is_row.sum().double())):
        raise RewardFunctionError(
            "the reward function dropped all responses of the step (reward.function.onError: Drop), so there is "
            "nothing to learn from: correct the function; the reward workers' logs have the errors",
            -1,
        )
    metrics: dict[str, float] = {}
    rewards = scores
    if overlong is not None:
        rewards, penalties = overlong.penalized(rewards, mask)
        metrics["reward/overlong_penalty/mean"] = _moments(penalties, is_row, ranks).mean
    if algorithm.kl.in_reward:
        old, ref = batch.tensor(Keys.OLD_LOG_PROBS), batch.tensor(Keys.REF_LOG_PROB)
        kl = kl_estimate(old, ref, algorithm.kl.estimator.value)
        rewards, kl_of_row = penalize_rewards(rewards, kl, mask, kl_coefficient)
        metrics["actor/reward_kl_penalty"] = _moments(kl_of_row, is_row, ranks).mean
    chosen = estimator_of(algorithm)
    values = batch.tensor(Keys.VALUES) if chosen.needs_values else None
    groups = batch.array(Keys.UID).tolist() if chosen.needs_groups else None
    raw, returns = chosen.compute(AdvantageInputs(rewards, mask, values, groups, algorithm.gamma, algorithm.lam))
    advantages = whiten(raw, mask, _moments(raw, mask, ranks)) if chosen.whitens else raw
    metrics |= statistics("critic/score", scores.sum(dim=1), is_row, ranks)
    metrics |= statistics("critic/rewards", (rewards * mask).sum(dim=1), is_row, ranks)
    metrics |= statistics("critic/advantages", advantages, mask, ranks)
    metrics |= statistics("critic/returns", returns, mask, ranks)
    if values is not None:
        metrics |= statistics("critic/values", values, mask, ranks)
    return with_metrics({Keys.ADVANTAGES: advantages.float(), Keys.RETURNS: returns.float()}, metrics)


def statistics(name: str, values: Tensor, mask: Tensor, ranks: Ranks) -> dict[str, float]:
    """Return mean, max and min over all ranks of the values where `mask` is not 0. Collective."""
    kept = values[mask.bool()].float()
    lowest = torch.tensor([-torch.inf, -torch.inf])
    ends = torch.stack([kept.max(), -kept.min()]) if kept.numel() else lowest
    highest, negative_lowest = ranks.max(ends).tolist()
    return {
        f"{name}/mean": _moments(values, mask, ranks).mean,
        f"{name}/max": highest,
        f"{name}/min": -negative_lowest,
    }


def with_metrics(tensors: Mapping[str, Tensor], metrics: Mapping[str, float]) -> DataProto:
    """Return a batch that carries metrics to the controller; they must be equal on all ranks."""
    return DataProto.from_dict(tensors, meta_info={Meta.METRICS: {name: [value] for name, value in metrics.items()}})


def _moments(values: Tensor, mask: Tensor, ranks: Ranks) -> Moments:
    return Moments.from_tensor(ranks.sum(Moments.of(values, mask).to_tensor()))
