"""From token rewards to advantages: GAE, GRPO, RLOO, REINFORCE++.

Called by the group that holds the values (critic) or, without a critic, by the actor group. Estimators that compare
the samples of a prompt need all samples of that prompt in the same call. Whitening over the whole batch is a step of
its own (`masked.whiten`), because its moments are summed over ranks: `Estimator.whitens` says who wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator reads.

    rewards: float32 [B, R] token-level rewards; one on a masked position is ignored.
    mask: [B, R], 1 on tokens that the policy wrote.
    values: float32 [B, R], for GAE.
    groups: B names of prompts, equal for the samples of one prompt, for GRPO and RLOO.
    gamma, lam: discount and GAE's lambda.
    """

    rewards: Tensor
    mask: Tensor
    values: Tensor | None = None
    groups: Sequence[Hashable] | None = None
    gamma: float = 1.0
    lam: float = 1.0


@dataclass(frozen=True)
class Estimator:
    """One row of the table.

    compute: AdvantageInputs -> (advantages, returns), both float32 [B, R] and 0 outside the mask, not whitened.
    needs_values: reads `AdvantageInputs.values`, so the job needs a critic.
    needs_groups: reads `AdvantageInputs.groups`, and all samples of a prompt must be in one call.
    whitens: the advantages are whitened over the whole batch afterwards.
    """

    compute: Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
    needs_values: bool
    needs_groups: bool
    whitens: bool


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, equations 11, 12 and 16).

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1};  returns = A + V.
    t + 1 is the next unmasked token: gaps (a tool's output in the middle of a response) carry V and A over.
    """
    if inputs.values is None:
        raise ValueError("gae needs values: it is the estimator with a critic")
    rewards, values, mask = inputs.rewards, inputs.values, inputs.mask.bool()
    next_value_B = torch.zeros_like(values[:, 0])
    next_advantage_B = torch.zeros_like(next_value_B)
    columns: list[Tensor] = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta_B = rewards[:, t] + inputs.gamma * next_value_B - values[:, t]
        advantage_B = delta_B + inputs.gamma * inputs.lam * next_advantage_B
        next_value_B = torch.where(mask[:, t], values[:, t], next_value_B)
        next_advantage_B = torch.where(mask[:, t], advantage_B, next_advantage_B)
        columns.append(next_advantage_B)
    advantages = torch.stack(columns[::-1], dim=1)
    return _outside_zero(advantages, mask), _outside_zero(advantages + values, mask)


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A_i = (R_i - mean of the group) / (standard deviation of the group + 1e-6), the same for all tokens of sample i;
    the deviation with n - 1, as in verl. A group of one has nothing to compare with: mean 0, deviation 1 (verl's).
    """
    total_B = _sequence_rewards(inputs)
    advantage_B = total_B.clone()
    for rows in _rows_by_group(inputs):
        if len(rows) > 1:
            group = total_B[rows]
            advantage_B[rows] = (group - group.mean()) / (group.std() + 1e-6)
    return _spread(advantage_B, inputs.mask)


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, equation 8).

    A_i = R_i - mean of the other samples of the prompt. A group of one keeps its reward.
    """
    total_B = _sequence_rewards(inputs)
    advantage_B = total_B.clone()
    for rows in _rows_by_group(inputs):
        if len(rows) > 1:
            group = total_B[rows]
            advantage_B[rows] = group - (group.sum() - group) / (len(rows) - 1)
    return _spread(advantage_B, inputs.mask)


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the discounted rewards to come, whitened over the whole batch.

    G_t = r_t + gamma * G_{t+1} over unmasked tokens; the KL penalty is in the rewards already. No critic, no groups.
    """
    mask = inputs.mask.bool()
    following_B = torch.zeros_like(inputs.rewards[:, 0])
    columns: list[Tensor] = []
    for t in range(inputs.rewards.shape[1] - 1, -1, -1):
        following_B = torch.where(mask[:, t], inputs.rewards[:, t] + inputs.gamma * following_B, following_B)
        columns.append(following_B)
    returns = _outside_zero(torch.stack(columns[::-1], dim=1), mask)
    return returns, returns


ESTIMATORS: Final[dict[str, Estimator]] = {
    "gae": Estimator(gae, needs_values=True, needs_groups=False, whitens=True),
    "grpo": Estimator(grpo, needs_values=False, needs_groups=True, whitens=False),
    "rloo": Estimator(rloo, needs_values=False, needs_groups=True, whitens=False),
    "reinforce++": Estimator(reinforce_plus_plus, needs_values=False, needs_groups=False, whitens=True),
}


def estimator(name: str) -> Estimator:
    """Return the estimator of that name.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}: choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def _outside_zero(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))


def _sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    return _outside_zero(inputs.rewards, inputs.mask.bool()).sum(dim=-1)


def _spread(advantage_B: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages = advantage_B.unsqueeze(-1) * mask.to(advantage_B.dtype)
    return advantages, advantages


def _rows_by_group(inputs: AdvantageInputs) -> list[list[int]]:
    if inputs.groups is None:
        raise ValueError("grpo and rloo compare the samples of a prompt: groups (one name per sequence) are needed")
    if len(inputs.groups) != inputs.rewards.shape[0]:
        raise ValueError(f"{len(inputs.groups)} group names for {inputs.rewards.shape[0]} sequences")
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(inputs.groups):
        rows.setdefault(group, []).append(row)
    return list(rows.values())
