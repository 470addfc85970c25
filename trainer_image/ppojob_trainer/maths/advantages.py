"""From token rewards to advantages: GAE, GRPO, Dr.GRPO, RLOO, REINFORCE++.

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

# Columns of one matrix product in the discounted sums: the product costs B * L * 256, the loop L / 256 steps.
SCAN_COLUMNS: Final = 256


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator reads.

    rewards: float32 [B, R] token-level rewards; one on a masked position is ignored.
    mask: [B, R], 1 on tokens that the policy wrote. A row without any (a copy, or a response that the reward dropped)
        counts nowhere.
    values: float32 [B, R], for GAE.
    groups: B names of prompts, equal for the samples of one prompt, for estimators that compare them.
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
        raise ValueError("GAE needs values: it is the estimator with a critic")
    tokens = _Tokens.of(inputs.mask)
    rewards_BL, values_BL = tokens.together(inputs.rewards), tokens.together(inputs.values)
    next_values_BL = torch.zeros_like(values_BL)
    next_values_BL[:, :-1] = values_BL[:, 1:]
    deltas_BL = rewards_BL + inputs.gamma * next_values_BL - values_BL
    advantages_BL = _discounted_sums(deltas_BL, inputs.gamma * inputs.lam)
    advantages = tokens.put_back(advantages_BL, inputs.values)
    return advantages, tokens.put_back(advantages_BL + values_BL, inputs.values)


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A_i = (R_i - mean of the group) / (standard deviation of the group + 1e-6), the same for all tokens of sample i;
    the deviation with n - 1, as in verl. A group of one has nothing to compare with: mean 0, deviation 1 (verl's).
    Rows without tokens are in no group; see `_compared`.
    """
    return _compared(inputs, lambda group: (group - group.mean()) / (group.std() + 1e-6))


def dr_grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GRPO without the deviation (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783, section 3.2).

    A_i = R_i - mean of the group, the same for all tokens of sample i. The paper also divides the loss by a constant
    length: aggregation SeqMeanTokenSumNorm. Rows without tokens are in no group; see `_compared`.
    """
    return _compared(inputs, lambda group: group - group.mean())


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, equation 8).

    A_i = R_i - mean of the other samples of the prompt. A group of one keeps its reward. Rows without tokens are in no
    group; see `_compared`.
    """
    return _compared(inputs, lambda group: group - (group.sum() - group) / (len(group) - 1))


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the discounted rewards to come, whitened over the whole batch.

    G_t = r_t + gamma * G_{t+1} over unmasked tokens; the KL penalty is in the rewards already. No critic, no groups.
    """
    tokens = _Tokens.of(inputs.mask)
    returns_BL = _discounted_sums(tokens.together(inputs.rewards), inputs.gamma)
    returns = tokens.put_back(returns_BL, inputs.rewards)
    return returns, returns


ESTIMATORS: Final[dict[str, Estimator]] = {
    "GAE": Estimator(gae, needs_values=True, needs_groups=False, whitens=True),
    "GRPO": Estimator(grpo, needs_values=False, needs_groups=True, whitens=False),
    "DrGRPO": Estimator(dr_grpo, needs_values=False, needs_groups=True, whitens=False),
    "RLOO": Estimator(rloo, needs_values=False, needs_groups=True, whitens=False),
    "ReinforcePlusPlus": Estimator(reinforce_plus_plus, needs_values=False, needs_groups=False, whitens=True),
}


@dataclass(frozen=True)
class _Tokens:
    """The unmasked tokens, N in all: row and column [N] in [B, R], and place [N], their number within the row.

    longest: L, the most tokens of a row.
    """

    row: Tensor
    column: Tensor
    place: Tensor
    longest: int

    @classmethod
    def of(cls, mask: Tensor) -> _Tokens:
        chosen = mask.bool()
        row, column = chosen.nonzero(as_tuple=True)
        longest = int(chosen.sum(dim=1).max()) if chosen.numel() else 0
        return cls(row, column, (chosen.cumsum(dim=1) - 1)[row, column], longest)

    def together(self, values: Tensor) -> Tensor:
        """Take the tokens of [B, R] without the gaps between them: float64 [B, L], 0 behind the last one."""
        moved = torch.zeros(values.shape[0], self.longest, dtype=torch.float64, device=values.device)
        moved[self.row, self.place] = values[self.row, self.column].double()
        return moved

    def put_back(self, values_BL: Tensor, like: Tensor) -> Tensor:
        """Undo `together`: [B, R] of the shape and dtype of `like`, 0 outside the mask."""
        spread = torch.zeros_like(like)
        spread[self.row, self.column] = values_BL[self.row, self.place].to(like.dtype)
        return spread


def _discounted_sums(values_BL: Tensor, factor: float) -> Tensor:
    """Return y_t = x_t + factor * y_{t+1}, float64 [B, L].

    A chunk of columns at a time: within a chunk y = x @ M with M[u, t] = factor^(u - t) for u >= t, and what follows
    the chunk is added with its power. At 32 k tokens that is 128 steps in place of 32 k.
    """
    length = values_BL.shape[1]
    steps = torch.arange(SCAN_COLUMNS, dtype=torch.float64, device=values_BL.device)
    distance = steps.unsqueeze(1) - steps
    weights = torch.where(distance >= 0, factor ** distance.clamp(min=0), 0.0)
    sums = torch.empty_like(values_BL)
    following_B1 = values_BL.new_zeros(values_BL.shape[0], 1)
    for start in range((length - 1) // SCAN_COLUMNS * SCAN_COLUMNS, -1, -SCAN_COLUMNS):
        chunk = values_BL[:, start : start + SCAN_COLUMNS]
        width = chunk.shape[1]
        # From column t on, the next chunk begins width - t steps later.
        carried = factor ** (width - steps[:width])
        sums[:, start : start + width] = chunk @ weights[:width, :width] + following_B1 * carried
        following_B1 = sums[:, start : start + 1]
    return sums


def _outside_zero(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))


def _sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    return _outside_zero(inputs.rewards, inputs.mask.bool()).sum(dim=-1)


def _spread(advantage_B: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages = advantage_B.unsqueeze(-1) * mask.to(advantage_B.dtype)
    return advantages, advantages


def _compared(inputs: AdvantageInputs, compare: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Compare the rewards [n] of each group; a group of one keeps its reward.

    Rows without tokens are left out of their group. A response that is the last one left in its group has no baseline,
    so its advantage is 0: its plain reward would be on another scale than the others' advantages.
    """
    total_B = _sequence_rewards(inputs)
    advantage_B = total_B.clone()
    has_tokens = inputs.mask.bool().any(dim=1).tolist()
    for rows in _rows_by_group(inputs):
        kept = [row for row in rows if has_tokens[row]]
        if len(kept) > 1:
            advantage_B[kept] = compare(total_B[kept])
        elif len(rows) > 1:
            advantage_B[kept] = 0.0
    return _spread(advantage_B, inputs.mask)


def _rows_by_group(inputs: AdvantageInputs) -> list[list[int]]:
    if inputs.groups is None:
        raise ValueError("an estimator that compares the samples of a prompt needs groups: one name per sequence")
    if len(inputs.groups) != inputs.rewards.shape[0]:
        raise ValueError(f"{len(inputs.groups)} group names for {inputs.rewards.shape[0]} sequences")
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(inputs.groups):
        rows.setdefault(group, []).append(row)
    return list(rows.values())
