"""Each estimator and policy loss, computed for real on a policy of one number: all schedules give the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AdvantageEstimator, AlgorithmSpec, PolicyLoss
from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.algorithms import AdvantageInputs, PolicyLossInputs, estimator_of, policy_loss_of
from ppojob_trainer.controller.ports import Metrics
from ppojob_trainer.maths.losses import Denominators, policy_loss
from ppojob_trainer.maths.policy_losses import Clipping
from tests.unit.trainer.controller.conftest import MakeRun
from tests.unit.trainer.controller.fake_ports import FakeActor, FakeAdvantages
from tests.unit.trainer.controller.fake_world import FakeBatch, World, number_of

MODES = [ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED]
EXAMPLE = str(Path("examples/12-own-algorithm/algorithm.py").absolute())
OWN = {"advantageFunction": {"path": EXAMPLE, "needsGroups": True}}
OWN_LOSS = {"policyLossFunction": {"path": EXAMPLE}}
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
GROUPS = ["a", "a", "b", "b"]


def drawn(*inputs: object) -> Tensor:
    """Return numbers from 0 to 1 that depend on all inputs, float64 [4, 3]."""
    return torch.tensor([[number_of(row, column, *inputs) for column in range(3)] for row in range(4)]).double() * MASK


class ComputingActor(FakeActor):
    """Its number is the weight of a policy: the log-prob of a token is minus the weight times a feature."""

    def __init__(self, world: World, algorithm: AlgorithmSpec) -> None:
        super().__init__(world)
        self._compute = policy_loss_of(algorithm)

    async def compute_log_prob(self, batch: FakeBatch) -> FakeBatch:
        weight = self.world.actor
        return (await super().compute_log_prob(batch)).union(FakeBatch(len(batch), {"weight": weight}))

    async def update(self, batch: FakeBatch) -> Metrics:
        await self.world.phase("update_actor", int(batch.columns["step"]))
        features, advantages = drawn("features", batch.columns["response"]), batch.columns["advantage"]
        metrics: dict[str, float] = {}
        # From the second on, the ratios are not 1.
        for number in range(3):
            weight = torch.tensor(self.world.actor, dtype=torch.float64, requires_grad=True)
            old = -features * batch.columns["weight"]
            inputs = PolicyLossInputs(-features * weight, old, torch.tensor(advantages), MASK, Clipping(0.01, 0.02))
            loss, shares = policy_loss(inputs, Denominators.of(MASK), self._compute, "SeqMeanTokenMean")
            self.world.actor -= float(torch.autograd.grad(loss, weight)[0])
            metrics |= {f"actor/{name}/{number}": float(share) for name, share in shares.items()}
        return metrics


class ComputingAdvantages(FakeAdvantages):
    """Draws rewards from the score and values from the critic's number, and computes the estimator."""

    def __init__(self, world: World, algorithm: AlgorithmSpec) -> None:
        super().__init__(world)
        self._estimator = estimator_of(algorithm)

    async def compute_advantages(self, batch: FakeBatch, kl_coefficient: float) -> tuple[FakeBatch, Metrics]:
        await self.world.phase("advantages", int(batch.columns["step"]))
        rewards = drawn("rewards", batch.columns["score"])
        values = drawn("values", batch.columns["value"]) if self._estimator.needs_values else None
        found, _ = self._estimator.compute(AdvantageInputs(rewards, MASK, values, GROUPS, 0.9, 0.8))
        columns: Any = {"advantage": found.tolist()}
        return FakeBatch(len(batch), columns), {"critic/advantages/max": float(found.max())}


def algorithms() -> list[dict[str, Any]]:
    """Return each estimator with PPO, and each policy loss with GRPO."""
    own = {"Function": OWN}
    own_loss = {"Function": OWN_LOSS}
    return [
        *({"advantageEstimator": name.value, **own.get(name.value, {})} for name in AdvantageEstimator),
        *(
            {"advantageEstimator": "GRPO", "policyLoss": name.value, **own_loss.get(name.value, {})}
            for name in PolicyLoss
            if name is not PolicyLoss.PPO
        ),
    ]


@pytest.mark.parametrize(
    "raw", algorithms(), ids=lambda raw: f"{raw['advantageEstimator']}-{raw.get('policyLoss', 'PPO')}"
)
async def test_all_modes_give_the_same_numbers(make_run: MakeRun, raw: dict[str, Any]) -> None:
    algorithm = AlgorithmSpec.model_validate(raw)
    numbers = []
    for mode in MODES:
        run = make_run(mode, steps=3, has_critic=algorithm.needs_critic)
        actor, advantages = ComputingActor(run.world, algorithm), ComputingAdvantages(run.world, algorithm)
        run.ppo._ports = run.ppo._plan._ports = replace(run.ppo._ports, actor=actor, advantages=advantages)
        await run()
        metrics = [
            {name: value for name, value in record.items() if name.startswith(("actor/", "critic/"))}
            for record in run.monitor.records.values()
        ]
        numbers.append((run.world.actor, run.world.critic, metrics))

    assert numbers[0] == numbers[1] == numbers[2]
    assert numbers[0][0] != 1.0, "the policy is updated"
