"""A replica that lost its engine: what is reported of it, and the weights of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import EngineLostError, RolloutError
from ppojob_trainer.engines.weights.plans import LinkPlan, Receivers, WeightLink, link_plans
from ppojob_trainer.worker_groups.errors import (
    WorkerFailedError,
    WorkerGroupError,
    WorkerLostError,
    WorkerOutOfMemoryError,
)
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import RolloutGroup
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from tests.unit.trainer.worker_groups.fake_processes import (
    Processes,
    actor,
    as_group,
    group_of,
    places_told,
    receipt,
    replicas_of,
    spec_of,
)

LOST = WorkerLostError("rollout rank 1 was lost during collect: the actor died")


def failed(cause: Exception) -> WorkerFailedError:
    error = WorkerFailedError(f"rollout rank 1 failed in collect: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("failure", "loses_rows"), [(LOST, True), (failed(EngineLostError("vLLM's engine exited")), False)]
)
async def test_an_engine_that_was_lost_is_reported_and_left_out_from_then_on(
    failure: WorkerGroupError, loses_rows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Processes(
        2, {RolloutWorker.load: lambda: ["capacity 0", "capacity 1"], RolloutWorker.collect: raising(failure)}
    )
    rollout = RolloutGroup(replicas_of(engines), spec_of({"actor": "train"}), "train")
    await rollout.load()
    assert rollout.engines == {0: "capacity 0", 1: "capacity 1"}

    with caplog.at_level(logging.WARNING):
        report = await rollout.begin(1, is_validation=False).exchange(1, [], None, 1)

    assert (report.failure, report.are_rows_lost, report.rows) == (failure, loses_rows, ())
    assert rollout.engines == {0: "capacity 0"}
    assert rollout.num_lost == 1
    assert [len(group) for group in rollout.groups] == [1 if loses_rows else 2], "its process stays for its responses"
    assert (RolloutWorker.stop in engines.calls) is not loses_rows
    assert str(failure) in caplog.text
    assert "Engines left in pool train: 1." in caplog.text


async def test_a_lost_engine_takes_the_processes_of_its_other_gpus_along(holders: Processes) -> None:
    """They have no responses, and one that was lost on another node must not explain later failures."""
    engines = Processes(2, {RolloutWorker.collect: raising(failed(EngineLostError("a node is gone")))})
    rollout = RolloutGroup(replicas_of(engines, holders), spec_of({"actor": "train"}), "train")
    assert [len(group) for group in rollout.groups] == [2, 2]

    await rollout.begin(1, is_validation=False).exchange(1, [], None, 1)

    assert [len(group) for group in rollout.groups] == [2, 1]
    assert holders.killed == [1]


@pytest.mark.parametrize(
    "failure", [failed(RolloutError("a request was refused")), WorkerOutOfMemoryError("out of memory")]
)
async def test_another_failure_is_no_loss(failure: WorkerGroupError) -> None:
    rollout = RolloutGroup(
        replicas_of(Processes(2, {RolloutWorker.collect: raising(failure)})), spec_of({"actor": "train"}), "train"
    )

    with pytest.raises(type(failure)) as found:
        await rollout.begin(1, is_validation=False).exchange(0, [], None, 1)

    assert found.value is failure
    assert rollout.num_lost == 0


def raising(failure: Exception) -> Callable[..., Any]:
    def answer(*_: Any) -> Any:
        raise failure

    return answer


@pytest.mark.parametrize(
    ("placement", "left"),
    [
        # Ranks 0 and 1 send to the first replica's workers; ranks 2 and 3 had the second's.
        ({"actor": "train"}, [[("rank 0", 1), ("rank 1", 1)]]),
        ({"actor": "train", "rollout": ["write"]}, [[("rank 0", 1), ("rank 1", 1)]]),
    ],
)
async def test_before_the_next_push_the_weights_are_connected_without_a_lost_engine(
    holders: Processes, placement: dict[str, Any], left: list[Any]
) -> None:
    spec = spec_of(placement)
    answers = {
        RolloutWorker.update_weights: lambda version: [[receipt(version)] * 2],
        RolloutWorker.connect_weights: lambda places: [[{}, {}]],
    }
    replicas, sender = Processes(2, answers), actor()
    rollout = group_of(spec, replicas, holders)
    weights = WeightsGroup(as_group(sender), [rollout], spec)
    await weights.connect()
    replicas.calls.clear()

    rollout.lose(1, LOST)
    moved = await weights.push(1)
    assert places_told(replicas) == left
    assert (moved["comm_receivers/update_weights"], moved["comm_read_back/update_weights"]) == (2, 2)

    replicas.calls.clear()
    await weights.push(2)
    assert RolloutWorker.connect_weights not in replicas.calls, "once for each loss"


@pytest.mark.parametrize("failure", [LOST, failed(EngineLostError("vLLM's engine exited while it was idle"))])
async def test_an_engine_that_was_lost_while_it_was_idle_is_found_before_a_push(
    replicas: Processes, holders: Processes, failure: WorkerGroupError
) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    gone = Processes(2, {RolloutWorker.check: raising(failure)})
    shared = RolloutGroup(replicas_of(gone, holders), spec, "write")
    own = group_of(spec, replicas, holders)
    weights = WeightsGroup(as_group(actor()), [own, shared], spec)

    moved = await weights.push(1)

    assert (moved["comm_receivers/update_weights"], moved["comm_read_back/update_weights"]) == (4, 4)
    assert RolloutWorker.update_weights not in gone.calls
    replicas.answers[RolloutWorker.check] = raising(failure)
    with pytest.raises(type(failure)):
        await weights.push(2)


async def test_an_engine_that_is_lost_before_it_sleeps_fails_nothing() -> None:
    failure = failed(EngineLostError("vLLM's engine exited before it slept"))
    rollout = RolloutGroup(
        replicas_of(Processes(2, {RolloutWorker.sleep: raising(failure)})), spec_of({"actor": "train"}), "train"
    )

    await rollout.begin(1, is_validation=False).end()

    assert rollout.lost == {0: failure, 1: failure}


@pytest.mark.parametrize("part", ["weights", "kv_cache"])
async def test_an_engine_that_is_lost_while_it_wakes_up_costs_no_attempt(replicas: Processes, part: str) -> None:
    failure = failed(EngineLostError("vLLM's engine exited before it woke up"))
    spec = spec_of({"actor": "train"})
    rollout = group_of(spec, replicas)
    weights = WeightsGroup(as_group(actor()), [rollout], spec)
    await weights.connect()
    calls = iter([failure])

    def wake(tag: str) -> None:
        if tag == part and (found := next(calls, None)) is not None:
            raise found

    replicas.answers[RolloutWorker.wake] = wake

    moved = await weights.push(1)

    assert rollout.ranks == [1]
    assert moved["comm_receivers/update_weights"] == (1 if part == "weights" else 2)


async def test_a_pool_that_lost_all_its_engines_gets_no_weights(replicas: Processes, holders: Processes) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    gone = Processes(2, {})
    shared = RolloutGroup(replicas_of(gone, holders), spec, "write")
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders), shared], spec)
    for rank in (0, 1):
        shared.lose(rank, LOST)

    moved = await weights.push(1)

    assert (moved["comm_receivers/update_weights"], moved["comm_read_back/update_weights"]) == (4, 4)
    assert gone.calls == {}


def test_workers_of_a_lost_engine_receive_nothing() -> None:
    receivers = [Receivers(2, on_actor=False, lost=frozenset({0})), Receivers(3, on_actor=True, lost=frozenset({1}))]

    assert link_plans(Device.CUDA, 3, receivers) == [
        LinkPlan(0, "cuda_ipc", (2,)),
        LinkPlan(2, "cuda_ipc", (4,)),
        LinkPlan(0, "nccl", (1,)),
    ]


@pytest.mark.parametrize(
    "failure", [WorkerLostError("actor rank 0 was lost during push_weights"), failed(RuntimeError("CUDA error"))]
)
async def test_engines_that_wait_for_an_actor_that_failed_are_not_asked(
    replicas: Processes, failure: WorkerGroupError, broken_off: list[WeightLink]
) -> None:
    spec, sender = spec_of({"actor": "train"}), actor()
    weights = WeightsGroup(as_group(sender), [group_of(spec, replicas)], spec)
    await weights.connect()
    asked: list[None] = []
    replicas.answers[RolloutWorker.check] = lambda: asked.append(None)
    sender.answers[ActorWorker.push_weights] = raising(failure)

    with pytest.raises(type(failure)) as found:
        await weights.push(1)

    assert found.value is failure
    assert len(asked) == len(replicas), "once, before the push"
    assert broken_off, "the engines would wait for the actor"
