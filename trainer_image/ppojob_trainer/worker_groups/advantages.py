"""Advantages, on the ranks of the critic's group (or the actor's, if there is no critic).

Each rank has some rows; sums over ranks make whitening and statistics those of the whole batch. Called by the workers
of both roles. It has no state and changes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.algorithms import AdvantageInputs, estimator_of
from ppojob_trainer.maths.kl import kl_estimate, penalize_rewards
from ppojob_trainer.maths.masked import Moments, whiten
from ppojob_trainer.maths.overlong import Overlong
from ppojob_trainer.protocol import DataProto, Keys, Meta, Ragged
from ppojob_trainer.rewards import RewardFunctionError

__all__ = [
    "READ_BY_ADVANTAGES",
    "AdvantageSettings",
    "Ranks",
    "compute_advantages",
    "statistics",
    "unread_by_advantages",
    "with_metrics",
]


class Ranks(Protocol):
    """Sums over the ranks that hold the batch together."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks. Collective."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Return the largest over ranks. Collective."""
        ...


@dataclass(frozen=True)
class AdvantageSettings:
    """The settings of the spec that are read here.

    response_length: data.maxResponseLength, the width R of the padded tensors that estimators get. overlong: what is
    subtracted from the scores of overlong responses. sources: names of the sources of a mixture.
    """

    algorithm: AlgorithmSpec
    response_length: int
    overlong: Overlong | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: PPOJobSpec) -> AdvantageSettings:
        """Return those of a spec."""
        length, penalty = spec.data.max_response_length, spec.reward.overlong_penalty
        overlong = None if penalty is None else Overlong(length, penalty.buffer, penalty.factor)
        sources = tuple(source.name for source in spec.data.train.mixture or ())
        return cls(spec.algorithm, length, overlong, sources)


READ_BY_ADVANTAGES = (
    Keys.RESPONSE_MASK,
    Keys.TOKEN_LEVEL_SCORES,
    Keys.OLD_LOG_PROBS,
    Keys.REF_LOG_PROB,
    Keys.VALUES,
    Keys.UID,
    Keys.SOURCE,
)
"""The last five only with some settings, see `unread_by_advantages`."""


def unread_by_advantages(settings: AdvantageSettings) -> frozenset[str]:
    """Return the columns that `compute_advantages` does not read with these settings."""
    algorithm = settings.algorithm
    is_read = {
        Keys.OLD_LOG_PROBS: algorithm.kl.in_reward,
        Keys.REF_LOG_PROB: algorithm.kl.in_reward,
        Keys.VALUES: algorithm.needs_critic,
        Keys.UID: algorithm.needs_groups,
        Keys.SOURCE: bool(settings.sources),
    }
    return frozenset(column for column, read in is_read.items() if not read)


def compute_advantages(batch: DataProto, settings: AdvantageSettings, kl_coefficient: float, ranks: Ranks) -> DataProto:
    """Return advantages and returns; the statistics are in meta_info. Collective.

    Args:
        batch: needs response_mask, token_level_scores, and the columns of the estimator: values, uid; with KL in the
            reward old_log_probs and ref_log_prob; with a mixture source. Rows whose mask is False are copies or were
            dropped, and do not count.
        kl_coefficient: of the KL penalty in the reward.

    Raises:
        AlgorithmFunctionError: the user's estimator cannot be loaded or returned something wrong.
        RewardFunctionError: the reward dropped all responses.
    """
    algorithm, overlong, width = settings.algorithm, settings.overlong, settings.response_length
    mask = batch.padded(Keys.RESPONSE_MASK, width).long()
    scores = batch.padded(Keys.TOKEN_LEVEL_SCORES, width)
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
        old, ref = batch.padded(Keys.OLD_LOG_PROBS, width), batch.padded(Keys.REF_LOG_PROB, width)
        kl = kl_estimate(old, ref, algorithm.kl.estimator.value)
        rewards, kl_of_row = penalize_rewards(rewards, kl, mask, kl_coefficient)
        metrics["actor/reward_kl_penalty"] = _moments(kl_of_row, is_row, ranks).mean
    chosen = estimator_of(algorithm)
    values = batch.padded(Keys.VALUES, width) if chosen.needs_values else None
    groups = batch.array(Keys.UID).tolist() if chosen.needs_groups else None
    raw, returns = chosen.compute(AdvantageInputs(rewards, mask, values, groups, algorithm.gamma, algorithm.lam))
    advantages = whiten(raw, mask, _moments(raw, mask, ranks)) if chosen.whitens else raw
    metrics |= statistics("critic/score", scores.sum(dim=1), is_row, ranks)
    metrics |= _of_sources(batch, settings.sources, scores.sum(dim=1), is_row, ranks)
    metrics |= statistics("critic/rewards", (rewards * mask).sum(dim=1), is_row, ranks)
    metrics |= statistics("critic/advantages", advantages, mask, ranks)
    metrics |= statistics("critic/returns", returns, mask, ranks)
    if values is not None:
        metrics |= statistics("critic/values", values, mask, ranks)
    unpadded = batch.ragged(Keys.RESPONSE_MASK).unpadded
    return with_metrics(
        {Keys.ADVANTAGES: unpadded(advantages.float()), Keys.RETURNS: unpadded(returns.float())}, metrics
    )


def _of_sources(
    batch: DataProto, names: Sequence[str], scores: Tensor, is_row: Tensor, ranks: Ranks
) -> dict[str, float]:
    """Return the share of each source of a mixture in the batch, and the mean of its scores. Collective."""
    if not names:
        return {}
    sources = batch.array(Keys.SOURCE).tolist()
    is_of = torch.tensor([[source == name for name in names] for source in sources]) & is_row[:, None]
    counts, sums = ranks.sum(torch.stack([is_of.double().sum(dim=0), (is_of * scores[:, None].double()).sum(dim=0)]))
    shares = (counts / counts.sum()).tolist()
    means = {
        name: total / count for name, total, count in zip(names, sums.tolist(), counts.tolist(), strict=True) if count
    }
    return {
        **{f"mixture/{name}/share": share for name, share in zip(names, shares, strict=True)},
        **{f"mixture/{name}/score/mean": mean for name, mean in means.items()},
    }


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


def with_metrics(tensors: Mapping[str, Ragged | Tensor], metrics: Mapping[str, float]) -> DataProto:
    """Return a batch that carries metrics to the controller; they must be equal on all ranks."""
    return DataProto.from_dict(tensors, meta_info={Meta.METRICS: {name: [value] for name, value in metrics.items()}})


def _moments(values: Tensor, mask: Tensor, ranks: Ranks) -> Moments:
    return Moments.from_tensor(ranks.sum(Moments.of(values, mask).to_tensor()))
