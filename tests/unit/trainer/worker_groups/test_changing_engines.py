"""Pushes of weights while engines start or are lost: numbers and groups are those of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from ppojob_trainer.engines.errors import RolloutMemoryError
from ppojob_trainer.worker_groups.dispatch import split_all_to_all
from ppojob_trainer.worker_groups.errors import WorkerFailedError, WorkerOutOfMemoryError
from ppojob_trainer.worker_groups.roles import elastic_rollout
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from tests.unit.trainer.worker_groups.fake_processes import actor, as_group
from tests.unit.trainer.worker_groups.test_elastic_rollout import LOST, A, B, C, Pool, Some, failed, pool_of, spec_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_rollout, "POLL_S", 0.0)
    monkeypatch.setattr(elastic_rollout, "PAUSE_S", 0.0)


async def connected(*pools: Pool) -> WeightsGroup:
    weights = WeightsGroup(as_group(actor()), [pool.rollout for pool in pools], spec_of())
    for pool in pools:
        await pool.rollout.load()
    await weights.connect()
    return weights


async def test_an_engine_that_starts_leaves_the_numbers_of_later_pools_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pool_of(1, A), pool_of(1, B)
    weights = await connected(first, second)
    loaded = asyncio.Event()
    call = Some.call

    def slow(self: Some, method: Any, *arguments: Any) -> Any:
        return asyncio.ensure_future(loaded.wait()) if method is RolloutWorker.load else call(self, method, *arguments)

    monkeypatch.setattr(Some, "call", slow)
    first.nodes.places.append(C)
    watching = asyncio.create_task(first.rollout.watch())
    for _ in range(50):
        await asyncio.sleep(0)
    assert (first.rollout.ranks, first.rollout.num_replicas) == ([0], 2)

    assert (await weights.push(1))["comm_receivers/update_weights"] == 2.0

    watching.cancel()


async def test_a_loss_that_a_generation_finds_while_engines_are_connected_costs_one_more_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(1, A, B, C)
    weights = await connected(pool)
    monkeypatch.setattr(elastic_rollout, "PAUSE_S", 1000.0)
    pool.rollout.lose(0, LOST)
    call, of_actor = Some.call, weights._of_actor

    def strict(self: Some, method: Any, *arguments: Any) -> Any:
        if method is RolloutWorker.connect_weights:
            split_all_to_all(arguments[0], len(self), method.__name__)
        return call(self, method, *arguments)

    async def with_loss(answer: Awaitable[Any]) -> Any:
        found = await of_actor(answer)
        if 1 in pool.rollout.ranks:
            pool.rollout.lose(1, LOST)
        return found

    monkeypatch.setattr(Some, "call", strict)
    monkeypatch.setattr(weights, "_of_actor", with_loss)

    assert (await weights.push(1))["comm_receivers/update_weights"] == 1.0
    assert pool.rollout.ranks == [2]


@pytest.mark.parametrize("failure", [WorkerOutOfMemoryError("rollout rank 0"), "cause"])
async def test_an_engine_without_memory_ends_a_push_before_others_are_asked(failure: Any) -> None:
    """They may still wait for the actor, until the limit of their link."""
    pool = pool_of(1, A, B)
    weights = await connected(pool)
    raised = failed(RolloutMemoryError("out of memory")) if failure == "cause" else failure
    pool.replicas.answers["update_weights", 0] = raised
    # The push looks for lost engines once before it begins.
    asked = len([name for name, _ in pool.replicas.calls if name == "check"]) + 2

    with pytest.raises((WorkerFailedError, WorkerOutOfMemoryError)) as found:
        await weights.push(1)

    assert found.value is raised
    assert len([name for name, _ in pool.replicas.calls if name == "check"]) == asked
