"""KL estimators and controllers, by hand and against the true KL."""

import math

import pytest
import torch

from ppojob_trainer.maths.kl import KL_ESTIMATORS, kl_estimate, make_kl_controller, penalize_rewards


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # prob 0.5 and ref 0.25: log-ratio log 2, r = 1/2.
        ("K1", math.log(2)),
        ("K2", 0.5 * math.log(2) ** 2),
        ("K3", 0.5 - 1 + math.log(2)),
        ("Abs", math.log(2)),
    ],
)
def test_by_hand(estimator: str, expected: float) -> None:
    value = kl_estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), estimator)
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["K1", "K3"])
def test_expectation_is_the_true_kl(estimator: str) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    truth = (policy * (policy / reference).log()).sum()
    expectation = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    assert expectation.item() == pytest.approx(truth.item())


@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_extreme_ratios_stay_finite_with_their_gradients(estimator: str) -> None:
    log_prob = torch.tensor([-500.0, 0.0, -1.0], requires_grad=True)
    kl = kl_estimate(log_prob, torch.tensor([0.0, -500.0, -1.0]), estimator)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert kl[2].item() == 0
    assert log_prob.grad.isfinite().all()


def test_k3_is_never_negative() -> None:
    log_prob = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert (kl_estimate(log_prob, torch.zeros(1000), "K3") >= 0).all()


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': choose one of K1, K2, K3, Abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_penalty_by_hand() -> None:
    scores = torch.tensor([[0.0, 1.0, 9.0], [2.0, 9.0, 9.0]])
    kl = torch.tensor([[0.1, 0.3, 9.0], [-0.5, 9.0, 9.0]])
    rewards, per_sequence = penalize_rewards(scores, kl, torch.tensor([[1, 1, 0], [1, 0, 0]]), 0.5)
    assert rewards.flatten().tolist() == pytest.approx([-0.05, 0.85, 0.0, 2.25, 0.0, 0.0])
    assert per_sequence.tolist() == pytest.approx([0.2, -0.5])


class TestControllers:
    def test_fixed_stays(self) -> None:
        controller = make_kl_controller("Fixed", 0.1)
        controller.update(current_kl=100.0, num_samples=1000)
        assert controller.coefficient == 0.1

    @pytest.mark.parametrize(
        ("current", "factor"),
        # Horizon 1000, 100 samples: 1 + clip(current / 0.1 - 1, -0.2, 0.2) * 0.1.
        [(0.1, 1.0), (0.11, 1.01), (0.2, 1.02), (99.0, 1.02), (0.05, 0.98), (-1.0, 0.98)],
    )
    def test_adaptive_moves_towards_its_target(self, current: float, factor: float) -> None:
        controller = make_kl_controller("Adaptive", 0.2, target=0.1, horizon=1000)
        controller.update(current, num_samples=100)
        assert controller.coefficient == pytest.approx(0.2 * factor)

    def test_state_survives_a_restart(self) -> None:
        first, second = (make_kl_controller("Adaptive", 0.2, 0.1, 1000) for _ in range(2))
        first.update(0.5, 64)
        second.load_state_dict(first.state_dict())
        assert second.coefficient == first.coefficient != 0.2

    def test_a_fixed_coefficient_is_that_of_the_configuration(self) -> None:
        controller = make_kl_controller("Fixed", 0.3)
        controller.load_state_dict(make_kl_controller("Fixed", 0.1).state_dict())
        assert controller.coefficient == 0.3

    @pytest.mark.parametrize(("mine", "theirs"), [("Fixed", "Adaptive"), ("Adaptive", "Fixed")])
    def test_a_state_of_another_type_is_refused(self, mine: str, theirs: str) -> None:
        with pytest.raises(ValueError, match=f"the checkpoint's KL controller is '{theirs}'"):
            make_kl_controller(mine, 0.1).load_state_dict(make_kl_controller(theirs, 0.1).state_dict())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("Other", 0.1), "unknown KL controller"),
            (("Adaptive", 0.1, 0.0, 10), "target > 0"),
            (("Adaptive", 0.1, 0.1, 0), "horizon > 0"),
        ],
    )
    def test_what_is_refused(self, arguments, message) -> None:
        with pytest.raises(ValueError, match=message):
            make_kl_controller(*arguments)
