"""Replicas of several GPUs: which GPUs each is told of, and which worker of vLLM's meets which sender."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.errors import EngineLostError, RolloutError, WeightSyncError
from ppojob_trainer.engines.weights.transfer import LinkPlan, Receipt, Receivers, WeightLink, link_plans
from ppojob_trainer.protocol import Keys
from ppojob_trainer.worker_groups.errors import (
    WorkerFailedError,
    WorkerGroupError,
    WorkerLostError,
    WorkerOutOfMemoryError,
)
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import Collected, GpuHolder, RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import RolloutGroup
from ppojob_trainer.worker_groups.roles.trained import TrainedWorker
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from ppojob_trainer.worker_groups.table import StoredRows, Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup


class Processes:
    """Answers calls from a table, and remembers their arguments."""

    def __init__(self, number: int, answers: dict[Any, Callable[..., Any]]) -> None:
        self.number, self.answers = number, answers
        self.calls: dict[Any, Any] = {}
        self.arguments: dict[Any, tuple[Any, ...]] = {}

    def only(self, *ranks: int) -> Processes:
        part = Processes(len(ranks), self.answers)
        part.calls, part.arguments = self.calls, self.arguments
        return part

    def __len__(self) -> int:
        return self.number

    def call(self, method: Any, *args: Any) -> asyncio.Future[Any]:
        self.calls[method], self.arguments[method] = args[0] if args else None, args
        answer = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(self.answers.get(method, lambda *_: None)(*args))
        except WorkerGroupError as failure:
            answer.set_exception(failure)
        return answer


def as_group(processes: Processes) -> WorkerGroup[Any]:
    return cast("WorkerGroup[Any]", processes)


def group_of(spec: PPOJobSpec, replicas: Processes, holders: Processes | None = None) -> RolloutGroup:
    """Those of the rollout's own pool."""
    return RolloutGroup(
        as_group(replicas), spec, spec.placement.rollout_pools[0], None if holders is None else as_group(holders)
    )


def spec_of(placement: dict[str, Any]) -> PPOJobSpec:
    return resolve(
        parse_spec(
            {
                "image": "i",
                "model": {"actor": {"path": "/m"}},
                "data": {"train": {"reasoningGym": {"task": "t"}}, "trainBatchSize": 256},
                "reward": {"function": {"module": "r"}},
                "pools": [{"name": "train", "gpusPerNode": 4}, {"name": "write", "gpusPerNode": 4}],
                "placement": placement,
                "rollout": {"tensorParallelSize": 2},
                "storage": {"claimName": "c"},
            }
        )
    )


@pytest.fixture
def replicas() -> Processes:
    """Two replicas of two GPUs; the first processes have GPUs 0 and 2."""
    return Processes(
        2,
        {
            RolloutWorker.update_weights: lambda version: [receipt(version), receipt(version)],
            RolloutWorker.connect_weights: lambda places: [[{"P2P/CUMEM": 1}, {}], [{}, {}]],
        },
    )


@pytest.fixture
def holders() -> Processes:
    return Processes(2, {GpuHolder.visible_gpu: lambda: ["1", "3"]})


def receipt(version: int) -> Receipt:
    return Receipt(version, 1, 8, (version,), is_read_back=True)


def link(plan: LinkPlan) -> WeightLink:
    return WeightLink(plan.backend, f"rank {plan.sender_rank}", 1, len(plan.receivers), 9)


def actor(sends: Callable[[int], Receipt] = receipt) -> Processes:
    return Processes(
        4,
        {
            ActorWorker.open_weights: lambda plans: [[link(plan) for plan in of_rank] for of_rank in plans],
            ActorWorker.connect_weights: lambda: [{"NET/IB": 1}, {}, {}, {}],
            ActorWorker.push_weights: lambda version: [sends(version)] * 4,
        },
    )


def places_told(replicas: Processes) -> list[list[tuple[str, int]]]:
    """For each worker of each replica the sender and the number it connects with."""
    told = replicas.calls[RolloutWorker.connect_weights]
    return [[(link.address, number) for link, number in each] for each in told]


async def test_a_replica_is_told_of_its_holders_gpus(replicas: Processes, holders: Processes) -> None:
    rollout = RolloutGroup(as_group(replicas), spec_of({"actor": "train"}), "train", as_group(holders))
    await rollout.begin_load()
    assert replicas.calls[RolloutWorker.begin_load] == [["1"], ["3"]]


async def test_a_replica_with_a_gpu_of_its_own_is_told_of_no_other(replicas: Processes) -> None:
    await RolloutGroup(as_group(replicas), spec_of({"actor": "train"}), "train").begin_load()
    assert replicas.calls[RolloutWorker.begin_load] == [[], []]


async def test_where_gpus_are_shared_each_worker_meets_the_rank_on_its_gpu(
    replicas: Processes, holders: Processes
) -> None:
    spec = spec_of({"actor": "train"})
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders)], spec)
    await weights.connect()
    places = [
        [(link.address, number) for link, number in each] for each in replicas.calls[RolloutWorker.connect_weights]
    ]
    assert places == [[("rank 0", 1), ("rank 1", 1)], [("rank 2", 1), ("rank 3", 1)]]
    await weights.push(1)


async def test_in_a_pool_of_their_own_all_workers_meet_rank_zero(replicas: Processes, holders: Processes) -> None:
    spec = spec_of({"actor": "train", "rollout": ["write"]})
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders)], spec)
    sent = await weights.connect()
    places = [
        [(link.address, number) for link, number in each] for each in replicas.calls[RolloutWorker.connect_weights]
    ]
    assert places == [[("rank 0", 1), ("rank 0", 2)], [("rank 0", 3), ("rank 0", 4)]]
    assert sent == [{"NET/IB": 1}, {}, {}, {}, {"P2P/CUMEM": 1}, {}, {}, {}], (
        "of each rank, then of each engine's worker"
    )


def test_engines_give_their_weights_up_where_they_share_gpus_with_training(replicas: Processes) -> None:
    shared, apart = (spec_of(placement) for placement in ({"actor": "train"}, {"actor": "train", "rollout": ["write"]}))
    found = [WeightsGroup(as_group(actor()), [group_of(spec, replicas)], spec).are_released for spec in (shared, apart)]

    assert found == [True, False]


async def test_who_shares_the_gpus_frees_what_it_keeps_before_an_engine_that_slept_takes_memory(
    replicas: Processes,
) -> None:
    order: list[str] = []
    neighbours = [Processes(4, {TrainedWorker.free_cached_memory: lambda: order.append("freed")}) for _ in range(2)]
    replicas.answers[RolloutWorker.wake] = order.append
    for placement in ({"actor": "train"}, {"actor": "train", "rollout": ["write"]}):
        spec = spec_of(placement)
        rollout = group_of(spec, replicas)
        await WeightsGroup(as_group(actor()), [rollout], spec, [as_group(each) for each in neighbours]).push(1)
    assert order == ["freed", "freed", "weights", "kv_cache"], "in a pool of its own it does not sleep"


async def test_other_weights_than_were_sent_are_seen(replicas: Processes, holders: Processes) -> None:
    spec = spec_of({"actor": "train"})
    sender = actor(lambda version: receipt(version + 1))
    weights = WeightsGroup(as_group(sender), [group_of(spec, replicas, holders)], spec)
    with pytest.raises(WeightSyncError):
        await weights.push(1)


@pytest.mark.parametrize(
    ("placement", "senders"), [({"actor": "train"}, 4), ({"actor": "train", "rollout": ["write"]}, 1)]
)
async def test_the_rate_of_a_push_is_that_of_one_worker_however_many_send(
    replicas: Processes, holders: Processes, placement: dict[str, str], senders: int
) -> None:
    spec = spec_of(placement)
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders)], spec)

    moved = await weights.push(1)

    assert moved["comm_mb/update_weights"] == pytest.approx(senders * 8e-6)
    assert moved["comm_gb_per_s/update_weights"] * moved["comm_s/update_weights"] == pytest.approx(8e-9)


async def test_engines_in_a_pool_that_is_shared_meet_rank_zero_beside_those_on_the_actors_gpus(
    replicas: Processes, holders: Processes
) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    shared = Processes(2, dict(replicas.answers))
    order: list[tuple[str, str]] = []
    for name, processes in (("own", replicas), ("shared", shared)):
        processes.answers[RolloutWorker.wake] = lambda tag, name=name: order.append((name, tag))
    groups = [group_of(spec, replicas, holders), RolloutGroup(as_group(shared), spec, "write", as_group(holders))]
    weights = WeightsGroup(as_group(actor()), groups, spec)

    await weights.connect()
    moved = await weights.push(1)

    assert places_told(replicas) == [[("rank 0", 1), ("rank 1", 1)], [("rank 2", 1), ("rank 3", 1)]]
    assert places_told(shared) == [[("rank 0", 1), ("rank 0", 2)], [("rank 0", 3), ("rank 0", 4)]]
    assert order == [("own", "weights"), ("shared", "weights"), ("own", "kv_cache"), ("shared", "kv_cache")]
    assert moved["comm_mb/update_weights"] == pytest.approx(5 * 8e-6)
    assert moved["comm_read_back/update_weights"] == 8


async def test_other_weights_in_a_pool_that_is_shared_are_seen(replicas: Processes, holders: Processes) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    answers = {RolloutWorker.update_weights: lambda version: [receipt(version), receipt(version + 1)]}
    shared = RolloutGroup(as_group(Processes(2, answers)), spec, "write", as_group(holders))
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders), shared], spec)

    with pytest.raises(WeightSyncError):
        await weights.push(1)


@pytest.mark.parametrize("is_validation", [False, True])
@pytest.mark.parametrize(
    ("placement", "pool", "shares"),
    [
        ({"actor": "train", "critic": "write", "rollout": ["train", "write"]}, "write", True),
        ({"actor": "train", "rollout": ["write"]}, "write", False),
    ],
)
async def test_engines_beside_a_role_that_trains_sleep_at_the_end_of_a_generation_but_not_of_a_validation(
    placement: dict[str, Any], pool: str, shares: bool, is_validation: bool
) -> None:
    engines = Processes(2, {})

    await RolloutGroup(as_group(engines), spec_of(placement), pool).begin(1, is_validation=is_validation).end()

    assert (RolloutWorker.sleep in engines.calls) is (shares and not is_validation)


async def test_a_replica_gets_its_prompts_under_their_numbers_and_reports_some_of_them() -> None:
    collected = Collected((7, 4), StoredRows((), (0, 2), {Keys.RESPONSE_MASK: [3.0, 5.0]}, {}))
    engines = Processes(2, {RolloutWorker.collect: lambda num_rows: collected if num_rows == 2 else None})
    rollout = RolloutGroup(as_group(engines), spec_of({"actor": "train"}), "train")
    generating = rollout.begin(3, is_validation=False)
    prompts = cast("Table", object())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ppojob_trainer.worker_groups.table.ray.put", lambda value: value)
        report = await generating.exchange(1, [4, 7, 8], prompts, 2)

    assert engines.arguments[RolloutWorker.begin] == (prompts, [4, 7, 8], 3, 1, False)
    assert report.rows == (7, 4)
    assert report.batch is not None
    assert report.batch.sums[Keys.RESPONSE_MASK] == (3.0, 5.0)
    assert (await generating.exchange(1, [], None, 1)).rows == ()


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
    rollout = RolloutGroup(as_group(engines), spec_of({"actor": "train"}), "train")
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


@pytest.mark.parametrize(
    "failure", [failed(RolloutError("a request was refused")), WorkerOutOfMemoryError("out of memory")]
)
async def test_another_failure_is_no_loss(failure: WorkerGroupError) -> None:
    rollout = RolloutGroup(
        as_group(Processes(2, {RolloutWorker.collect: raising(failure)})), spec_of({"actor": "train"}), "train"
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
        ({"actor": "train", "rollout": ["write"]}, [[("rank 0", 1), ("rank 0", 2)]]),
    ],
)
async def test_before_the_next_push_the_weights_are_connected_without_a_lost_engine(
    holders: Processes, placement: dict[str, Any], left: list[Any]
) -> None:
    spec = spec_of(placement)
    answers = {
        RolloutWorker.update_weights: lambda version: [receipt(version)],
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
    assert moved["comm_read_back/update_weights"] == 2

    replicas.calls.clear()
    await weights.push(2)
    assert RolloutWorker.connect_weights not in replicas.calls, "once for each loss"


@pytest.mark.parametrize("failure", [LOST, failed(EngineLostError("vLLM's engine exited while it was idle"))])
async def test_an_engine_that_was_lost_while_it_was_idle_is_found_before_a_push(
    replicas: Processes, holders: Processes, failure: WorkerGroupError
) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    gone = Processes(2, {RolloutWorker.check: raising(failure)})
    shared = RolloutGroup(as_group(gone), spec, "write", as_group(holders))
    own = group_of(spec, replicas, holders)
    weights = WeightsGroup(as_group(actor()), [own, shared], spec)

    moved = await weights.push(1)

    assert moved["comm_read_back/update_weights"] == 4
    assert RolloutWorker.update_weights not in gone.calls
    replicas.answers[RolloutWorker.check] = raising(failure)
    with pytest.raises(type(failure)):
        await weights.push(2)


async def test_a_pool_that_lost_all_its_engines_gets_no_weights(replicas: Processes, holders: Processes) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    gone = Processes(2, {})
    shared = RolloutGroup(as_group(gone), spec, "write", as_group(holders))
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders), shared], spec)
    for rank in (0, 1):
        shared.lose(rank, LOST)

    moved = await weights.push(1)

    assert moved["comm_read_back/update_weights"] == 4
    assert gone.calls == {}


def test_workers_of_a_lost_engine_receive_nothing() -> None:
    receivers = [Receivers(2, on_actor=False, lost=frozenset({0})), Receivers(3, on_actor=True, lost=frozenset({1}))]

    assert link_plans(Device.CUDA, 3, receivers) == [
        LinkPlan(0, "cuda_ipc", (2,)),
        LinkPlan(2, "cuda_ipc", (4,)),
        LinkPlan(0, "nccl", (1,)),
    ]
