"""Importance weights against the formulas, token by token, and their metrics by hand."""

import math

import pytest
import torch

from ppojob_trainer.maths.importance import (
    Bounds,
    correction_metrics,
    effective_share,
    importance_weights,
)
from ppojob_trainer.maths.losses import Denominators, policy_loss
from ppojob_trainer.maths.policy_losses import Clipping, PolicyLoss, PolicyLossInputs, cispo, gspo, ppo

OLD = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.0, -9.0]])
ENGINE = torch.tensor([[-1.2, -4.0, -0.4], [-1.0, -1.5, -float("inf")]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def direct(bounds: Bounds) -> list[list[float]]:
    """The weights by plain arithmetic."""
    found = []
    for old, engine, mask in zip(OLD.tolist(), ENGINE.tolist(), MASK.tolist(), strict=True):
        logs = [a - b if m else 0.0 for a, b, m in zip(old, engine, mask, strict=True)]
        ratios = [math.exp(sum(logs))] * len(logs) if bounds.is_of_sequence else [math.exp(log) for log in logs]
        if bounds.lower is None:
            row = [min(ratio, bounds.upper) for ratio in ratios]
        else:
            row = [ratio if bounds.lower <= ratio <= bounds.upper else 0.0 for ratio in ratios]
        found.append([weight * m for weight, m in zip(row, mask, strict=True)])
    return found


@pytest.mark.parametrize("is_of_sequence", [False, True])
@pytest.mark.parametrize(("upper", "lower"), [(2.0, None), (1.5, None), (2.0, 0.5), (5.0, 0.1), (20.0, 1.0)])
def test_the_weights_are_those_of_the_formula(is_of_sequence: bool, upper: float, lower: float | None) -> None:
    bounds = Bounds(is_of_sequence, upper, lower)

    torch.testing.assert_close(importance_weights(OLD, ENGINE, MASK, bounds), torch.tensor(direct(bounds)))


def test_the_same_policy_has_the_weight_one() -> None:
    for bounds in (Bounds(), Bounds(is_of_sequence=True), Bounds(lower=0.5)):
        assert importance_weights(OLD, OLD, MASK, bounds).tolist() == MASK.float().tolist()


def test_a_ratio_without_bounds_stays_finite() -> None:
    far = torch.full((1, 4), 300.0)

    weights = importance_weights(far, -far, torch.ones(1, 4), Bounds(upper=1e30, is_of_sequence=True))

    assert weights.tolist() == [[pytest.approx(math.exp(20))] * 4]


def test_the_metrics_by_hand() -> None:
    # Ratios e^0.2, e^2, e^-0.1 | e^-2, e^0.5 at the five tokens.
    found = correction_metrics(OLD, ENGINE, MASK, Bounds(upper=2.0, lower=0.5), Denominators.of(MASK))
    weights = [math.exp(0.2), 0.0, math.exp(-0.1), 0.0, math.exp(0.5)]
    logs = [0.2, 2.0, -0.1, -2.0, 0.5]

    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {
            "rollout_is_mean": sum(weights) / 5,
            "rollout_is_square": sum(weight**2 for weight in weights) / 5,
            "rollout_is_ratio_fraction_high": 1 / 5,
            "rollout_is_ratio_fraction_low": 1 / 5,
            "kl": -sum(logs) / 5,
            "k3_kl": sum(math.exp(log) - log - 1 for log in logs) / 5,
        },
        rel=1e-5,
    )


def test_shares_of_parts_add_up() -> None:
    denominators = Denominators.of(MASK)
    whole = correction_metrics(OLD, ENGINE, MASK, Bounds(), denominators)
    parts = [
        correction_metrics(OLD[rows], ENGINE[rows], MASK[rows], Bounds(), denominators)
        for rows in (slice(0, 1), slice(1, 2))
    ]

    torch.testing.assert_close(whole, {name: parts[0][name] + parts[1][name] for name in whole})


@pytest.mark.parametrize(("mean", "square", "share"), [(1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (0.0, 0.0, 0.0)])
def test_equal_weights_count_fully_and_weights_of_zero_do_not(mean: float, square: float, share: float) -> None:
    assert effective_share(mean, square) == share


@pytest.mark.parametrize("compute", [ppo, gspo, cispo])
def test_weighted_advantages_weigh_the_loss_of_each_token(compute: PolicyLoss) -> None:
    """The weights multiply the advantages, because each loss, dual clip included, is proportional to them."""
    clipping = Clipping(0.2, 0.2, 3.0)
    log_prob = torch.tensor([[-0.2, -3.0, -0.9, -0.1]])
    old = torch.tensor([[-1.0, -1.0, -1.0, -2.5]])
    advantages, weights = torch.tensor([[1.0, -2.0, 0.5, -1.0]]), torch.tensor([[0.3, 2.0, 0.0, 1.7]])
    for token in range(4):
        only = torch.zeros(1, 4)
        only[0, token] = 1
        one = Denominators.of(only)
        plain, _ = policy_loss(PolicyLossInputs(log_prob, old, advantages, only, clipping), one, compute)
        weighted, _ = policy_loss(PolicyLossInputs(log_prob, old, advantages * weights, only, clipping), one, compute)
        torch.testing.assert_close(weighted, weights[0, token] * plain)
