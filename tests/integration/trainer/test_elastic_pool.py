"""An elastic pool: a node is lost in mid-generation, another one joins, that one is lost in a push; no number changes.

A real Ray of several nodes, as the operator's pods make them, with real engines. One engine is in the actor's pool and
stays; the run is compared with one that has only this engine. `test_elastic_nodes` has more cases, with light engines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from ppojob_trainer.main import groups as groups_module
from ppojob_trainer.worker_groups.roles.elastic_rollout import ElasticRolloutGroup
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from tests.integration.trainer.lost_engines import NODE_LOST_STEP, LosesItsNode
from tests.integration.trainer.runs import Run, assert_same_steps, assert_same_weights, finish
from tests.integration.trainer.test_lost_engines import numbers_of, with_two_engines
from tests.integration.trainer.test_pools_over_nodes import started

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

STEPS = 3
ACTOR = {"name": "actor", "gpusPerNode": 1}
SPOT = {"name": "spot", "gpusPerNode": 1, "elastic": {"minNodes": 1, "maxNodes": 2}}


def spec_of(model: Path, pools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a job in these pools, all of which generate."""
    names = [pool["name"] for pool in pools]
    return with_two_engines(
        model,
        pools=pools,
        placement={"actor": "actor", "critic": "actor", "ref": "actor", "rollout": names},
        schedule={"mode": "Serial"},
        trainer={"totalSteps": STEPS, "validateEverySteps": 0},
    )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head with the actor's pool, and a node of pool `spot`."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = {"num_cpus": 2, "resources": {"pool_actor": 1}, "include_dashboard": False}
    found: Any = started(lambda: Cluster(initialize_head=True, head_node_args=head))  # type: ignore[no-untyped-call]
    try:
        add_node(found)
        monkeypatch.setenv("RAY_ADDRESS", found.address)
        yield found
    finally:
        found.shutdown()


def add_node(cluster: Any) -> None:
    started(partial(cluster.add_node, num_cpus=2, resources={"pool_spot": 1}))


def test_nodes_that_leave_and_join_change_no_number(
    cluster: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push = WeightsGroup.push

    async def push_with_the_new_engine(self: WeightsGroup, version: int) -> dict[str, float]:
        if version == NODE_LOST_STEP:
            add_node(cluster)
            [spot] = [rollout for rollout in self._rollouts if isinstance(rollout, ElasticRolloutGroup)]
            await spot.wait_for_engine()
        return await push(self, version)

    monkeypatch.setattr(WeightsGroup, "push", push_with_the_new_engine)
    monkeypatch.setattr(groups_module, "RolloutWorker", LosesItsNode)
    with caplog.at_level(logging.INFO):
        found = finish(tmp_path / "run", spec_of(model, [ACTOR, SPOT]))
    monkeypatch.undo()
    whole = finish(tmp_path / "whole", spec_of(model, [ACTOR]))

    assert of_all(found, "rollout/engines") == [1, 2, 1]
    assert of_all(found, "rollout/elastic_losses") == [1, 1, 2]
    assert of_all(found, "rollout/lost_engines") == [0] * STEPS
    assert [number > 0 for number in of_all(found, "rollout/repeated_samples")] == [True, False, False]
    assert of_all(found, "rollout/repeated_tokens")[0] > 0
    assert "the engines of rank 1 get weights" in caplog.text
    assert "once more, without the engines that were lost meanwhile" in caplog.text
    one, two = numbers_of(found, tmp_path / "found"), numbers_of(whole, tmp_path / "whole-numbers")
    assert_same_steps(one, two, rel=2e-2, absolute=2e-3)
    assert_same_weights(found, whole, model)


def of_all(run: Run, name: str) -> list[float]:
    return [run.records[step][name] for step in range(1, STEPS + 1)]
