"""Losses: hand-worked tables, and that neither cutting nor sharding a minibatch changes value, gradient or metric."""

import math

import pytest
import torch

from ppojob_trainer.maths.losses import (
    AGGREGATIONS,
    Denominators,
    aggregate,
    entropy_bonus,
    kl_loss,
    policy_loss,
    value_loss,
)
from ppojob_trainer.maths.policy_losses import POLICY_LOSSES, Clipping, PolicyLossInputs

ONE = Denominators(tokens=1, sequences=1)


def single(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


class TestPolicyLoss:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "expected", "gradient"),
        [
            # Clip at 0.8 and 1.3, dual clip at 3. The gradient is by log_prob: -A * ratio where nothing is clipped.
            (1.0, 2.0, -2.0, -2.0),
            (1.2, 1.0, -1.2, -1.2),
            (1.5, 1.0, -1.3, 0.0),  # good action became likelier: clipped above
            (0.5, 1.0, -0.5, -0.5),  # good action became rarer: not clipped
            (0.5, -1.0, 0.8, 0.0),  # bad action became rarer: clipped below
            (1.5, -1.0, 1.5, 1.5),  # bad action became likelier: not clipped
            (5.0, -1.0, 3.0, 0.0),  # but for the dual clip
            (5.0, 1.0, -1.3, 0.0),  # which does not touch good actions
        ],
    )
    def test_by_hand(self, ratio, advantage, expected, gradient) -> None:
        log_prob = single(math.log(ratio)).requires_grad_()
        clipping = Clipping(low=0.2, high=0.3, dual=3.0)
        inputs = PolicyLossInputs(log_prob, single(0.0), single(advantage), torch.ones(1, 1), clipping)
        loss, _ = policy_loss(inputs, ONE)
        loss.backward()
        assert loss.item() == pytest.approx(expected)
        assert log_prob.grad.item() == pytest.approx(gradient)

    def test_the_log_ratio_is_clamped(self) -> None:
        for log_ratio in (-1000.0, 1000.0):
            log_prob = single(log_ratio).requires_grad_()
            loss, metrics = policy_loss(PolicyLossInputs(log_prob, single(0.0), single(-1.0), torch.ones(1, 1)), ONE)
            loss.backward()
            assert loss.isfinite()
            assert log_prob.grad.isfinite().all()
            assert abs(metrics["ppo_kl"].item()) == 20

    def test_metrics_by_hand(self) -> None:
        ratios = torch.tensor([[1.5, 1.0, 5.0, 9.0]], dtype=torch.float64)
        advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
        mask = torch.tensor([[1, 1, 1, 0]])
        loss, metrics = policy_loss(
            PolicyLossInputs(ratios.log(), torch.zeros(1, 4), advantages, mask), Denominators.of(mask)
        )
        assert metrics["pg_loss"].item() == loss.item() == pytest.approx((-1.2 - 1.0 + 3.0) / 3)
        assert metrics["pg_clipfrac"].item() == pytest.approx(1 / 3)
        assert metrics["pg_clipfrac_lower"].item() == pytest.approx(1 / 3)
        assert metrics["ppo_kl"].item() == pytest.approx(-(math.log(1.5) + math.log(5)) / 3)


class TestOtherPolicyLosses:
    @pytest.mark.parametrize(
        ("ratios", "advantage", "expected", "gradients"),
        [
            # Geometric means of the ratios of two tokens; clip at 0.8 and 1.3. The third token is masked.
            ((1.0, 1.0), 2.0, -2.0, (-1.0, -1.0)),
            ((0.5, 2.0), 1.0, -1.0, (-0.5, -0.5)),  # two tokens far off: the response's ratio is 1
            ((2.0, 2.0), 1.0, -1.3, (0.0, 0.0)),
            ((0.5, 0.5), -1.0, 0.8, (0.0, 0.0)),
            ((4.0, 1.0), -1.0, 2.0, (1.0, 1.0)),  # the bad one became likelier: not clipped, and no dual clip
        ],
    )
    def test_gspo_by_hand(self, ratios, advantage, expected, gradients) -> None:
        log_prob = torch.tensor([[*map(math.log, ratios), 50.0]], dtype=torch.float64).requires_grad_()
        mask = torch.tensor([[1, 1, 0]])
        inputs = PolicyLossInputs(
            log_prob, torch.zeros_like(log_prob), torch.full((1, 3), advantage), mask, Clipping(0.2, 0.3)
        )
        loss, _ = policy_loss(inputs, Denominators.of(mask), POLICY_LOSSES["GSPO"], "SeqMeanTokenMean")
        loss.backward()
        assert loss.item() == pytest.approx(expected)
        assert log_prob.grad.tolist()[0] == pytest.approx([*gradients, 0.0])

    @pytest.mark.parametrize(
        ("ratio", "low", "advantage", "weight"),
        [(1.0, 0.2, 2.0, 1.0), (1.5, 0.2, 1.0, 1.3), (0.5, 0.2, 1.0, 0.8), (0.5, 1.0, 1.0, 0.5), (9.0, 0.2, -1.0, 1.3)],
    )
    def test_cispo_by_hand(self, ratio, low, advantage, weight) -> None:
        """Clipping bounds the weight of the gradient, and never removes the gradient."""
        log_prob = single(math.log(ratio)).requires_grad_()
        inputs = PolicyLossInputs(log_prob, single(0.0), single(advantage), torch.ones(1, 1), Clipping(low, 0.3))
        loss, metrics = policy_loss(inputs, ONE, POLICY_LOSSES["CISPO"])
        loss.backward()
        assert loss.item() == pytest.approx(-weight * advantage * math.log(ratio))
        assert log_prob.grad.item() == pytest.approx(-weight * advantage)
        assert metrics["pg_clipfrac"].item() == float(weight != ratio)


class TestValueLoss:
    @pytest.mark.parametrize(
        ("value", "old", "target", "expected", "gradient"),
        [
            (1.0, 1.0, 3.0, 2.0, -2.0),  # (1 - 3)^2 / 2
            (2.0, 1.0, 3.0, 1.125, 0.0),  # clipped to 1.5: 1.5^2 / 2 is the larger error
            (0.0, 1.0, 3.0, 4.5, -3.0),  # clipped to 0.5 has the smaller error
            (4.0, 3.0, 3.0, 0.5, 1.0),
        ],
    )
    def test_by_hand(self, value, old, target, expected, gradient) -> None:
        prediction = single(value).requires_grad_()
        loss, metrics = value_loss(prediction, single(old), single(target), torch.ones(1, 1), ONE, clip_range=0.5)
        loss.backward()
        assert loss.item() == metrics["vf_loss"].item() == pytest.approx(expected)
        assert prediction.grad.item() == pytest.approx(gradient)
        assert metrics["vf_clipfrac"].item() == (1.0 if gradient == 0 else 0.0)
        assert metrics["vpred_mean"].item() == value


class TestAggregation:
    LOSS = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])

    @pytest.mark.parametrize(
        ("mode", "expected"),
        # The third row has no tokens (padding): it is not a sequence.
        [
            ("TokenMean", 9 / 3),
            ("SeqMeanTokenSum", 9 / 2),
            ("SeqMeanTokenSumNorm", 9 / 2 / 3),
            ("SeqMeanTokenMean", (1.5 + 6) / 2),
        ],
    )
    def test_by_hand(self, mode: str, expected: float) -> None:
        assert aggregate(self.LOSS, self.MASK, mode, Denominators.of(self.MASK)).item() == pytest.approx(expected)

    def test_counts(self) -> None:
        counts = Denominators.of(self.MASK)
        assert counts == Denominators(tokens=3, sequences=2)
        assert Denominators.from_tensor(counts.to_tensor() * 2) == Denominators(tokens=6, sequences=4)

    def test_nothing_to_learn_from_is_zero_not_nan(self) -> None:
        empty = torch.zeros_like(self.MASK)
        for mode in AGGREGATIONS:
            assert aggregate(self.LOSS, empty, mode, Denominators.of(empty)).item() == 0

    def test_unknown_mode(self) -> None:
        with pytest.raises(ValueError, match="unknown loss aggregation 'mean': choose one of TokenMean"):
            aggregate(self.LOSS, self.MASK, "mean", ONE)


def batch(rows: int = 12, width: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    fields = ("parameters", "old_log_prob", "advantages", "old_values", "returns", "reference")
    tensors = {key: torch.randn(rows, width, generator=generator, dtype=torch.float64) for key in fields}
    return {**tensors, "mask": (torch.arange(width) < lengths).long()}


def whole_loss(part: dict[str, torch.Tensor], denominators: Denominators, mode: str, name: str):
    """All terms that an update has, on one parameter per token."""
    x, mask = part["parameters"], part["mask"]
    inputs = PolicyLossInputs(x, part["old_log_prob"], part["advantages"], mask)
    terms = [
        policy_loss(inputs, denominators, POLICY_LOSSES[name], mode),
        value_loss(x, part["old_values"], part["returns"], mask, denominators, 0.5, mode),
        entropy_bonus(x.sin(), mask, denominators, 0.01, mode),
        kl_loss((x - part["reference"]).square(), mask, denominators, 0.1, mode),
    ]
    loss = sum(term for term, _ in terms)
    return loss, {key: value for _, metrics in terms for key, value in metrics.items()}


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [1] * 12, [1, 2, 9]])
def test_cutting_a_minibatch_changes_nothing(name: str, mode: str, sizes: list[int]) -> None:
    """Micro-batches on one rank and shards over ranks are the same thing here: shares are added."""
    data = batch()
    denominators = Denominators.of(data["mask"])
    parameters = data["parameters"].clone().requires_grad_()
    expected, expected_metrics = whole_loss({**data, "parameters": parameters}, denominators, mode, name)
    expected.backward()

    other = data["parameters"].clone().requires_grad_()
    total, totals = 0.0, dict.fromkeys(expected_metrics, 0.0)
    pieces = zip(*[value.split(sizes) for value in data.values()], other.split(sizes), strict=True)
    for *values, piece in pieces:
        part = {**dict(zip(data, values, strict=True)), "parameters": piece}
        loss, metrics = whole_loss(part, denominators, mode, name)
        loss.backward(retain_graph=True)
        total += loss.item()
        totals = {key: totals[key] + metrics[key].item() for key in totals}

    assert total == pytest.approx(expected.item())
    assert totals == pytest.approx({key: value.item() for key, value in expected_metrics.items()})
    assert torch.allclose(other.grad, parameters.grad)  # type: ignore[arg-type]


def test_entropy_bonus_rewards_entropy() -> None:
    entropy = single(2.0).requires_grad_()
    loss, metrics = entropy_bonus(entropy, torch.ones(1, 1), ONE, coefficient=0.1)
    loss.backward()
    assert (loss.item(), entropy.grad.item(), metrics["entropy"].item()) == pytest.approx((-0.2, -0.1, 2.0))


def test_kl_metric_is_without_its_coefficient() -> None:
    loss, metrics = kl_loss(single(2.0), torch.ones(1, 1), ONE, coefficient=0.1)
    assert (loss.item(), metrics["kl_loss"].item()) == pytest.approx((0.2, 2.0))
