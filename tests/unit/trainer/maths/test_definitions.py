"""Every formula against its definition, written out in Python's float64, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppojob_trainer.maths.advantages import ESTIMATORS, SCAN_COLUMNS, AdvantageInputs
from ppojob_trainer.maths.kl import kl_estimate, penalize_rewards
from ppojob_trainer.maths.log_probs import linear_log_probs
from ppojob_trainer.maths.losses import (
    AGGREGATIONS,
    Denominators,
    aggregate,
    entropy_bonus,
    kl_loss,
    policy_loss,
    value_loss,
)
from ppojob_trainer.maths.masked import Moments, explained_variance, masked_mean, masked_var, masked_whiten
from ppojob_trainer.maths.policy_losses import Clipping, PolicyLossInputs

ROWS, WIDTH = 6, 9
GROUPS = ("a", "b", "a", "c", "b", "a")
Rows = list[list[float]]


def random_tensor(seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_mask(width: int = WIDTH) -> Tensor:
    """Rows of different lengths with gaps; the last row has one token, and none is at the start of the first."""
    generator = torch.Generator().manual_seed(99)
    mask = torch.rand(ROWS, width, generator=generator) < 0.7
    mask &= torch.arange(width) < torch.tensor([width, width // 2, width - 1, width // 3, width, 0]).unsqueeze(1)
    mask[0, 0], mask[5, 3] = False, True
    return mask


def chosen(values: Tensor, mask: Tensor) -> Rows:
    """The unmasked values of each row."""
    return [values[row, mask[row].bool()].tolist() for row in range(len(values))]


def assert_rows(found: Tensor, expected: Rows, mask: Tensor, tolerance: float = 1e-9) -> None:
    for mine, wanted in zip(chosen(found, mask), expected, strict=True):
        assert mine == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    assert found[~mask.bool()].abs().sum() == 0


def aggregated(of_token: Rows, mode: str) -> float:
    rows = [row for row in of_token if row]
    if mode == "TokenMean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    divided = {
        "SeqMeanTokenSum": sum,
        "SeqMeanTokenSumNorm": lambda row: sum(row) / WIDTH,
        "SeqMeanTokenMean": lambda row: sum(row) / len(row),
    }[mode]
    return sum(divided(row) for row in rows) / len(rows)


def each(function: Callable[..., float], mask: Tensor, *tensors: Tensor) -> Rows:
    """The function of every unmasked token's numbers."""
    columns = [chosen(tensor, mask) for tensor in tensors]
    return [[function(*token) for token in zip(*row, strict=True)] for row in zip(*columns, strict=True)]


class Operations(TorchDispatchMode):
    """Counts the calls of PyTorch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class TestAdvantages:
    # The second is more than two chunks of the scan; the discounts reach far and near.
    WIDTHS = (WIDTH, 2 * SCAN_COLUMNS + 77)
    DISCOUNTS = ((1.0, 1.0), (0.999, 0.97), (0.5, 0.0), (0.0, 0.9))

    @staticmethod
    def backwards(values: Sequence[float], step: Callable[[float, float], float]) -> list[float]:
        found, following = [], 0.0
        for value in reversed(values):
            following = step(value, following)
            found.append(following)
        return found[::-1]

    def gae(self, rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
        following = [*values[1:], 0.0]
        deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
        return self.backwards(deltas, lambda delta, later: delta + gamma * lam * later)

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_gae(self, width: int, gamma: float, lam: float, dtype: torch.dtype) -> None:
        rewards, values, mask = random_tensor(1, width).to(dtype), random_tensor(2, width).to(dtype), random_mask(width)
        advantages, returns = ESTIMATORS["GAE"].compute(AdvantageInputs(rewards, mask, values, gamma=gamma, lam=lam))
        kept = list(zip(chosen(rewards, mask), chosen(values, mask), strict=True))
        expected = [self.gae(*row, gamma, lam) for row in kept]
        assert advantages.dtype == returns.dtype == dtype
        tolerance = 1e-9 if dtype is torch.float64 else 1e-6
        assert_rows(advantages, expected, mask, tolerance)
        totals = [[a + v for a, v in zip(e, row[1], strict=True)] for e, row in zip(expected, kept, strict=True)]
        assert_rows(returns, totals, mask, tolerance)

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("gamma", [1.0, 0.99, 0.0])
    def test_reinforce_plus_plus(self, width: int, gamma: float) -> None:
        rewards, mask = random_tensor(3, width), random_mask(width)
        advantages, _ = ESTIMATORS["ReinforcePlusPlus"].compute(AdvantageInputs(rewards, mask, gamma=gamma))
        expected = [self.backwards(row, lambda reward, later: reward + gamma * later) for row in chosen(rewards, mask)]
        assert_rows(advantages, expected, mask)

    @pytest.mark.parametrize("hidden", [math.nan, math.inf])
    @pytest.mark.parametrize("name", ["GAE", "ReinforcePlusPlus"])
    def test_what_the_mask_hides_may_be_anything(self, name: str, hidden: float) -> None:
        rewards, values, mask = random_tensor(1), random_tensor(2), random_mask()
        dirty = [torch.where(mask, tensor, hidden) for tensor in (rewards, values)]
        clean = ESTIMATORS[name].compute(AdvantageInputs(rewards, mask, values))
        found = ESTIMATORS[name].compute(AdvantageInputs(dirty[0], mask, dirty[1]))
        torch.testing.assert_close(found, clean, atol=0, rtol=0)

    @pytest.mark.parametrize("name", ["GAE", "ReinforcePlusPlus"])
    @pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
    def test_nothing_to_learn_from(self, name: str, shape: tuple[int, int]) -> None:
        empty = torch.zeros(shape)
        advantages, returns = ESTIMATORS[name].compute(AdvantageInputs(empty, empty, empty))
        assert torch.equal(advantages, empty)
        assert torch.equal(returns, empty)

    @pytest.mark.parametrize("name", ["GAE", "ReinforcePlusPlus"])
    def test_long_responses_are_not_gone_through_column_by_column(self, name: str) -> None:
        width = 32_768
        values = torch.zeros(2, width)
        with Operations() as operations:
            ESTIMATORS[name].compute(AdvantageInputs(values, torch.ones(2, width), values))
        assert 10 < operations.count < width / 16

    def of_groups(self, name: str) -> tuple[Tensor, Rows]:
        rewards, mask = random_tensor(4), random_mask()
        advantages, _ = ESTIMATORS[name].compute(AdvantageInputs(rewards, mask, groups=GROUPS))
        totals = [sum(row) for row in chosen(rewards, mask)]
        expected = []
        for row, group in enumerate(GROUPS):
            others = [totals[other] for other in range(ROWS) if GROUPS[other] == group and other != row]
            expected.append(self.one_of_group(name, totals[row], others))
        lengths = mask.sum(dim=1).tolist()
        return advantages, [[value] * length for value, length in zip(expected, lengths, strict=True)]

    @staticmethod
    def one_of_group(name: str, mine: float, others: list[float]) -> float:
        if not others:
            return mine
        if name == "RLOO":
            return mine - sum(others) / len(others)
        group = [mine, *others]
        mean = sum(group) / len(group)
        if name == "DrGRPO":
            return mine - mean
        deviation = math.sqrt(sum((value - mean) ** 2 for value in group) / (len(group) - 1))
        return (mine - mean) / (deviation + 1e-6)

    @pytest.mark.parametrize("name", ["GRPO", "DrGRPO", "RLOO"])
    def test_advantages_within_a_group(self, name: str) -> None:
        advantages, expected = self.of_groups(name)
        assert_rows(advantages, expected, random_mask())


class TestKL:
    DEFINITIONS = {  # noqa: RUF012 - a table, never changed
        "K1": lambda log_prob, ref: log_prob - ref,
        "K2": lambda log_prob, ref: (log_prob - ref) ** 2 / 2,
        "K3": lambda log_prob, ref: math.exp(ref) / math.exp(log_prob) - 1 - (ref - log_prob),
        "Abs": lambda log_prob, ref: abs(log_prob - ref),
    }

    @pytest.mark.parametrize("estimator", list(DEFINITIONS))
    def test_estimators_and_the_penalty(self, estimator: str) -> None:
        log_prob, ref, scores, mask = random_tensor(5), random_tensor(6), random_tensor(7), random_mask()
        kl = kl_estimate(log_prob, ref, estimator)
        expected = each(self.DEFINITIONS[estimator], mask, log_prob, ref)
        assert_rows(torch.where(mask, kl, 0.0), [[min(value, 10.0) for value in row] for row in expected], mask)

        rewards, means = penalize_rewards(scores, kl, mask, 0.3)
        assert_rows(rewards, each(lambda score, value: score - 0.3 * value, mask, scores, kl), mask)
        assert means.tolist() == pytest.approx([sum(row) / len(row) for row in chosen(kl, mask)])


class TestLosses:
    @pytest.mark.parametrize("mode", list(AGGREGATIONS))
    def test_policy_loss(self, mode: str) -> None:
        log_prob, old, advantages, mask = random_tensor(8), random_tensor(9), random_tensor(10), random_mask()

        def of_token(new: float, before: float, advantage: float) -> float:
            ratio = math.exp(new - before)
            loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
            return min(loss, -advantage * 3.0) if advantage < 0 else loss

        clipping, counts = Clipping(low=0.2, high=0.3, dual=3.0), Denominators.of(mask)
        loss, metrics = policy_loss(
            PolicyLossInputs(log_prob, old, advantages, mask, clipping), counts, aggregation=mode
        )
        assert loss.item() == pytest.approx(aggregated(each(of_token, mask, log_prob, old, advantages), mode))
        kl = aggregated(each(lambda new, before: before - new, mask, log_prob, old), "TokenMean")
        assert metrics["ppo_kl"].item() == pytest.approx(kl)

    @pytest.mark.parametrize("mode", list(AGGREGATIONS))
    def test_value_loss(self, mode: str) -> None:
        values, old, returns, mask = random_tensor(11), random_tensor(12), random_tensor(13), random_mask()

        def of_token(value: float, before: float, target: float) -> float:
            near = min(max(value, before - 0.5), before + 0.5)
            return max((value - target) ** 2, (near - target) ** 2) / 2

        loss, _ = value_loss(values, old, returns, mask, Denominators.of(mask), 0.5, mode)
        assert loss.item() == pytest.approx(aggregated(each(of_token, mask, values, old, returns), mode))

    @pytest.mark.parametrize("mode", list(AGGREGATIONS))
    def test_means(self, mode: str) -> None:
        values, mask = random_tensor(14), random_mask()
        counts, expected = Denominators.of(mask), aggregated(chosen(values, mask), mode)
        assert aggregate(values, mask, mode, counts).item() == pytest.approx(expected)
        assert entropy_bonus(values, mask, counts, 0.1, mode)[0].item() == pytest.approx(-0.1 * expected)
        assert kl_loss(values, mask, counts, 0.2, mode)[0].item() == pytest.approx(0.2 * expected)


def flat(rows: Rows) -> Iterator[float]:
    return (value for row in rows for value in row)


def test_masked_statistics() -> None:
    values, others, mask = random_tensor(15), random_tensor(16), random_mask()
    numbers = list(flat(chosen(values, mask)))
    mean = sum(numbers) / len(numbers)
    squares = sum((number - mean) ** 2 for number in numbers)
    variance = squares / (len(numbers) - 1)
    assert masked_mean(values, mask).item() == pytest.approx(mean)
    assert masked_var(values, mask).item() == pytest.approx(variance)
    assert masked_var(values, mask, unbiased=False).item() == pytest.approx(squares / len(numbers))
    moments = Moments.of(values, mask)
    assert (moments.mean, moments.variance) == pytest.approx((mean, variance))
    whitened = each(lambda value: (value - mean) / math.sqrt(variance + 1e-8), mask, values)
    assert_rows(masked_whiten(values, mask), whitened, mask)

    residuals = list(flat(each(lambda value, other: value - other, mask, values, others)))
    level = sum(residuals) / len(residuals)
    unexplained = sum((number - level) ** 2 for number in residuals) / (len(residuals) - 1)
    found = explained_variance(moments, Moments.of(values - others, mask))
    assert found == pytest.approx(1 - unexplained / variance)


def test_log_probs_and_entropies() -> None:
    hidden, weight, labels = random_tensor(17)[:, :4], random_tensor(18)[:5, :4], [0, 4, 2, 2, 1, 3]
    log_probs, entropies = linear_log_probs(hidden, weight, torch.tensor(labels), temperature=0.7, chunk_size=4)
    for row, label in enumerate(labels):
        logits = [sum(h * w for h, w in zip(hidden[row].tolist(), word, strict=True)) for word in weight.tolist()]
        powers = [math.exp(logit / 0.7) for logit in logits]
        shares = [power / sum(powers) for power in powers]
        assert log_probs[row].item() == pytest.approx(math.log(shares[label]))
        assert entropies[row].item() == pytest.approx(-sum(share * math.log(share) for share in shares))
