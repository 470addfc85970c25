"""Replicas of several GPUs: which GPUs each is told of, and which worker of vLLM's meets which sender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.weights.transfer import LinkPlan, Receipt, WeightLink
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import (
    GpuHolder,
    RolloutGroup,
    RolloutWorker,
)
from ppojob_trainer.worker_groups.roles.trained import TrainedWorker
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup


class Processes:
    """Answers calls from a table, and remembers their arguments."""

    def __init__(self, number: int, answers: dict[Any, Callable[..., Any]]) -> None:
        self.number, self.answers = number, answers
        self.calls: dict[Any, Any] = {}

    def over(self, shares: Any) -> Processes:
        return self

    def only(self, rank: int) -> Processes:
        return self

    def __len__(self) -> int:
        return self.number

    async def call(self, method: Any, *args: Any) -> Any:
        self.calls[method] = args[0] if args else None
        return self.answers.get(method, lambda *_: None)(*args)


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


@pytest.mark.parametrize(
    ("placement", "pool", "sleeps"),
    [
        ({"actor": "train", "critic": "write", "rollout": ["train", "write"]}, "write", True),
        ({"actor": "train", "rollout": ["write"]}, "write", False),
    ],
)
async def test_engines_beside_a_role_that_trains_sleep_when_their_responses_are_written(
    placement: dict[str, Any], pool: str, sleeps: bool
) -> None:
    for streams in (False, True):
        # `collect` answers that there is no rest.
        engines = Processes(2, {RolloutWorker.generate: lambda prompts, *_: prompts})
        rollout = RolloutGroup(as_group(engines), spec_of(placement), pool)
        prompts = cast("Table", range(4))

        if streams:
            assert [part async for part in rollout.stream(prompts, 1)] == []
        else:
            await rollout.generate(prompts, 1)

        assert (list(engines.calls)[-1] is RolloutWorker.sleep) is sleeps


async def test_engines_stay_awake_after_validation() -> None:
    engines = Processes(2, {RolloutWorker.generate: lambda prompts, *_: prompts})
    rollout = RolloutGroup(as_group(engines), spec_of({"actor": "train"}), "train")

    await rollout.generate_for_validation(cast("Table", range(4)))

    assert list(engines.calls) == [RolloutWorker.generate]
