"""Advantage estimators: tables worked by hand, and the definitions written out token by token."""

import pytest
import torch

from ppojob_trainer.maths.advantages import ESTIMATORS, AdvantageInputs


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def brute_force_gae(rewards, values, gamma, lam):
    """Equation 16 as a sum over all later steps, for one sequence without gaps."""
    steps = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, steps)) for t in range(steps)]


class TestGAE:
    def test_by_hand(self) -> None:
        # gamma 0.9, lambda 0.5. delta_2 = 1 - 0.5 = 0.5; delta_1 = 0.9 * 0.5 - 0.4 = 0.05; delta_0 = 0.36 - 0.2 = 0.16.
        # A_2 = 0.5; A_1 = 0.05 + 0.45 * 0.5 = 0.275; A_0 = 0.16 + 0.45 * 0.275 = 0.28375.
        advantages, returns = ESTIMATORS["GAE"].compute(
            AdvantageInputs(tensor([[0, 0, 1]]), torch.ones(1, 3), tensor([[0.2, 0.4, 0.5]]), gamma=0.9, lam=0.5)
        )
        assert advantages[0].tolist() == pytest.approx([0.28375, 0.275, 0.5])
        assert returns[0].tolist() == pytest.approx([0.48375, 0.675, 1.0])

    def test_gamma_and_lambda_one_are_reward_to_go_minus_value(self) -> None:
        rewards, values = tensor([[0.1, 0.2, 1.0]]), tensor([[3.0, 2.0, 1.0]])
        advantages, returns = ESTIMATORS["GAE"].compute(AdvantageInputs(rewards, torch.ones(1, 3), values))
        assert returns[0].tolist() == pytest.approx([1.3, 1.2, 1.0])
        assert torch.allclose(advantages, returns - values)

    @pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 0.9)])
    def test_definition_with_padding(self, gamma: float, lam: float) -> None:
        generator = torch.Generator().manual_seed(1)
        rewards, values = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        lengths = [6, 3, 1, 4]
        mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(1)
        advantages, returns = ESTIMATORS["GAE"].compute(AdvantageInputs(rewards, mask, values, gamma=gamma, lam=lam))
        for row, length in enumerate(lengths):
            expected = brute_force_gae(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam)
            assert advantages[row, :length].tolist() == pytest.approx(expected)
            assert advantages[row, length:].abs().sum() == 0
            assert returns[row, length:].abs().sum() == 0
        assert torch.allclose(returns, (advantages + values) * mask)

    def test_a_gap_counts_as_if_it_were_not_there(self) -> None:
        rewards, values = tensor([[0.1, 7.0, 0.2, 1.0]]), tensor([[0.5, 9.0, 0.4, 0.3]])
        mask = torch.tensor([[1, 0, 1, 1]])
        with_gap, _ = ESTIMATORS["GAE"].compute(AdvantageInputs(rewards, mask, values, gamma=0.9, lam=0.8))
        expected = brute_force_gae([0.1, 0.2, 1.0], [0.5, 0.4, 0.3], 0.9, 0.8)
        assert with_gap[0].tolist() == pytest.approx([expected[0], 0.0, *expected[1:]])

    def test_it_needs_values(self) -> None:
        with pytest.raises(ValueError, match="GAE needs values"):
            ESTIMATORS["GAE"].compute(AdvantageInputs(torch.zeros(1, 1), torch.ones(1, 1)))


class TestGroups:
    # Rows 0, 2, 3 are samples of prompt a (rewards 1, 2, 6), row 1 of b alone (reward 5).
    REWARDS = tensor([[1, 0], [0, 5], [2, 9], [3, 3]])
    MASK = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
    GROUPS = ("a", "b", "a", "a")

    def compute(self, name: str) -> torch.Tensor:
        advantages, returns = ESTIMATORS[name].compute(AdvantageInputs(self.REWARDS, self.MASK, groups=self.GROUPS))
        assert torch.equal(advantages, returns)
        assert (advantages[~self.MASK.bool()] == 0).all()
        assert torch.equal(advantages[:, 0] * self.MASK[:, 1], advantages[:, 1])
        return advantages[:, 0]

    def test_grpo_by_hand(self) -> None:
        # mean 3, deviation sqrt((4 + 1 + 9) / 2) = sqrt(7); the lonely one keeps its reward.
        assert self.compute("GRPO").tolist() == pytest.approx([-2 / 7**0.5, 5.0, -1 / 7**0.5, 3 / 7**0.5], rel=1e-5)

    def test_rloo_by_hand(self) -> None:
        # Others' means: (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5, (1 + 2) / 2 = 1.5.
        assert self.compute("RLOO").tolist() == pytest.approx([-3.0, 5.0, -1.5, 4.5])

    def test_dr_grpo_by_hand(self) -> None:
        assert self.compute("DrGRPO").tolist() == pytest.approx([-2.0, 5.0, -1.0, 3.0])

    def test_equal_rewards_give_no_advantage(self) -> None:
        inputs = AdvantageInputs(tensor([[0.1], [0.1], [0.1]]), torch.ones(3, 1), groups=[1, 1, 1])
        for name in ("GRPO", "DrGRPO", "RLOO"):
            assert ESTIMATORS[name].compute(inputs)[0].abs().max() < 1e-6

    @pytest.mark.parametrize("name", ["GRPO", "DrGRPO", "RLOO"])
    def test_groups_must_be_there_and_fit(self, name: str) -> None:
        with pytest.raises(ValueError, match="groups"):
            ESTIMATORS[name].compute(AdvantageInputs(self.REWARDS, self.MASK))
        with pytest.raises(ValueError, match="2 group names for 4 sequences"):
            ESTIMATORS[name].compute(AdvantageInputs(self.REWARDS, self.MASK, groups=["a", "b"]))


@pytest.mark.parametrize("name", ["GRPO", "DrGRPO", "RLOO"])
def test_a_row_without_tokens_is_in_no_group(name: str) -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0], [0.0, 4.0]])
    mask = torch.tensor([[1, 0], [1, 1], [0, 0], [1, 1]])
    kept = [0, 1, 3]

    found, _ = ESTIMATORS[name].compute(AdvantageInputs(rewards, mask, groups=["a"] * 4))
    alone, _ = ESTIMATORS[name].compute(AdvantageInputs(rewards[kept], mask[kept], groups=["a"] * 3))

    assert torch.equal(found[kept], alone)
    assert not found[2].any()


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma 0.5: G_3 = 4, the gap carries 4, G_1 = 2 + 0.5 * 4 = 4, G_0 = 1 + 0.5 * 4 = 3.
    rewards, mask = tensor([[1, 2, 9, 4, 9]]), torch.tensor([[1, 1, 0, 1, 0]])
    advantages, returns = ESTIMATORS["ReinforcePlusPlus"].compute(AdvantageInputs(rewards, mask, gamma=0.5))
    assert advantages[0].tolist() == returns[0].tolist() == [3.0, 4.0, 0.0, 4.0, 0.0]


def test_the_table() -> None:
    facts = {name: (row.needs_values, row.needs_groups, row.whitens) for name, row in ESTIMATORS.items()}
    assert facts == {
        "GAE": (True, False, True),
        "GRPO": (False, True, False),
        "DrGRPO": (False, True, False),
        "RLOO": (False, True, False),
        "ReinforcePlusPlus": (False, False, True),
    }
