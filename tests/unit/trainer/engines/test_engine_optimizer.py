"""The course of the learning rate."""

import pytest
from torch import nn

from ppojob_api.v1alpha1.training import ActorSpec, LearningRateSchedule
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.learning_rate import learning_rate_factor


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        (LearningRateSchedule.CONSTANT, 0, [1, 1, 1, 1, 1]),
        (LearningRateSchedule.CONSTANT, 4, [0.25, 0.5, 0.75, 1, 1]),
        (LearningRateSchedule.LINEAR, 0, [1, 0.75, 0.5, 0.25, 0]),
        (LearningRateSchedule.LINEAR, 2, [0.5, 1, 1, 0.5, 0]),
        (LearningRateSchedule.COSINE, 0, [1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_warm_up_then_schedule(kind: LearningRateSchedule, warmup: int, expected: list[float]) -> None:
    training = ActorSpec(learning_rate_schedule=kind, learning_rate_warmup_steps=warmup)
    factor = learning_rate_factor(training, total_steps=4)
    assert [factor(update) for update in range(5)] == pytest.approx(expected, abs=1e-6)


def test_after_the_last_step_it_stays_at_the_end() -> None:
    factor = learning_rate_factor(ActorSpec(learning_rate_schedule=LearningRateSchedule.COSINE), total_steps=4)
    assert factor(9) == 0


def test_adamw_has_the_decay_rates_of_the_spec() -> None:
    optimizer = Optimizer(nn.Linear(2, 1), ActorSpec(betas=[0.5, 0.75]), total_steps=4)

    assert [group["betas"] for group in optimizer.adamw.param_groups] == [(0.5, 0.75)]
