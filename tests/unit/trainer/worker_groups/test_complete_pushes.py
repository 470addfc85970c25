"""Which pushes are complete, and which may leave out what training never changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.rollout import Quantization
from ppojob_trainer.engines.errors import EngineLostError, RolloutMemoryError, WeightSyncError
from ppojob_trainer.engines.weights.plans import engines_keep_weights
from ppojob_trainer.worker_groups.errors import WorkerGroupError
from ppojob_trainer.worker_groups.roles import elastic_rollout
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from tests.unit.trainer.worker_groups import test_elastic_rollout
from tests.unit.trainer.worker_groups.fake_processes import Processes, actor, as_group, group_of, receipt, spec_of
from tests.unit.trainer.worker_groups.test_elastic_rollout import LOST, A, B, failed, pool_of

APART: dict[str, Any] = {"actor": "train", "rollout": ["write"]}


def recording() -> tuple[Processes, list[bool]]:
    """Return an actor, and whether each of its pushes is partial."""
    sender, found = actor(), []
    push = sender.answers[ActorWorker.push_weights]

    def pushed(version: int, is_partial: bool) -> Any:
        found.append(is_partial)
        return push(version, is_partial)

    sender.answers[ActorWorker.push_weights] = pushed
    return sender, found


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (APART, [False, True, True]),
        # Engines that sleep discard their weights.
        ({"actor": "train"}, [False, False, False]),
        # Those in the critic's pool do; a push is the same for all.
        ({"actor": "train", "critic": "write", "rollout": ["train", "write"]}, [False, False, False]),
    ],
)
async def test_pushes_after_the_first_are_partial_if_no_engine_sleeps(
    replicas: Processes, holders: Processes, placement: dict[str, Any], expected: list[bool]
) -> None:
    spec = spec_of(placement)
    sender, is_partial = recording()
    weights = WeightsGroup(as_group(sender), [group_of(spec, replicas, holders)], spec)
    await weights.connect()
    for version in (1, 2, 3):
        await weights.push(version)
    assert is_partial == expected


def test_engines_keep_weights_if_they_neither_sleep_nor_round_them() -> None:
    apart, shared = spec_of(APART), spec_of({"actor": "train"})
    awake = shared.model_copy(update={"rollout": shared.rollout.model_copy(update={"sleep": False})})
    fp8 = apart.model_copy(update={"rollout": apart.rollout.model_copy(update={"quantization": Quantization.FP8})})
    assert [engines_keep_weights(spec) for spec in (apart, shared, awake, fp8)] == [True, False, True, False]


async def test_a_connection_without_a_lost_engine_begins_with_a_complete_push(
    replicas: Processes, holders: Processes
) -> None:
    spec = spec_of(APART)
    sender, is_partial = recording()
    rollout = group_of(spec, replicas, holders)
    weights = WeightsGroup(as_group(sender), [rollout], spec)
    await weights.connect()
    await weights.push(1)
    replicas.answers[RolloutWorker.update_weights] = lambda version: [[receipt(version)] * 2]
    replicas.answers[RolloutWorker.connect_weights] = lambda places: [[{}, {}]]
    rollout.lose(1, LOST)
    for version in (2, 3):
        await weights.push(version)
    assert is_partial == [False, False, True]


async def test_an_engine_that_joins_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_rollout, "POLL_S", 0.0)
    pool = pool_of(1, A)
    sender, is_partial = recording()
    weights = WeightsGroup(as_group(sender), [pool.rollout], test_elastic_rollout.spec_of())
    await pool.rollout.load()
    await weights.connect()
    for version in (1, 2):
        await weights.push(version)
    pool.nodes.places.append(B)
    watching = asyncio.create_task(pool.rollout.watch())
    for _ in range(50):
        await asyncio.sleep(0)
    receivers = [(await weights.push(version))["comm_receivers/update_weights"] for version in (3, 4)]
    watching.cancel()
    assert receivers == [2, 2]
    assert is_partial == [False, True, False, True]


@pytest.mark.parametrize(
    "failure",
    [
        failed(EngineLostError("vLLM's engine exited")),
        failed(RolloutMemoryError("out of memory")),
        WeightSyncError("other weights"),
    ],
)
async def test_after_a_partial_push_that_failed_the_next_one_is_complete(
    replicas: Processes, holders: Processes, failure: Exception
) -> None:
    spec = spec_of(APART)
    sender, is_partial = recording()
    weights = WeightsGroup(as_group(sender), [group_of(spec, replicas, holders)], spec)
    for version in (1, 2):
        await weights.push(version)
    works = replicas.answers[RolloutWorker.update_weights]

    def fails(version: int) -> Any:
        if isinstance(failure, WorkerGroupError):
            raise failure
        # The first replica has other weights than the actor.
        return [[replace(each, checksums=(0,)) for each in of_one] for of_one in works(version)]

    replicas.answers[RolloutWorker.update_weights] = fails
    with pytest.raises(type(failure)):
        await weights.push(3)
    replicas.answers[RolloutWorker.update_weights] = works
    for version in (4, 5):
        await weights.push(version)
    assert is_partial == [False, True, True, False, True]
