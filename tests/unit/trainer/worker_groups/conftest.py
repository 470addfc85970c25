"""The replicas of a rollout, as groups that answer from a table, and the weight links that were broken off."""

from __future__ import annotations

import pytest

from ppojob_trainer.engines.weights.plans import WeightLink
from ppojob_trainer.worker_groups.roles import weights
from ppojob_trainer.worker_groups.roles.gpu_holder import GpuHolder
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from tests.unit.trainer.worker_groups.fake_processes import Processes, receipt


@pytest.fixture
def replicas() -> Processes:
    """Two replicas of two GPUs; the first processes have GPUs 0 and 2."""
    replicas = Processes(2, {RolloutWorker.connect_weights: lambda places: [[{"P2P/CUMEM": 1}, {}], [{}, {}]]})
    replicas.answers[RolloutWorker.update_weights] = lambda version: [
        [receipt(version)] * len(workers) for workers in replicas.calls[RolloutWorker.connect_weights]
    ]
    return replicas


@pytest.fixture
def holders() -> Processes:
    return Processes(2, {GpuHolder.visible_gpu: lambda: ["1", "3"]})


@pytest.fixture(autouse=True)
def broken_off(monkeypatch: pytest.MonkeyPatch) -> list[WeightLink]:
    """Return the list of links that were broken off; nobody listens at their addresses."""
    found: list[WeightLink] = []
    monkeypatch.setattr(weights, "break_off", found.append)
    return found
