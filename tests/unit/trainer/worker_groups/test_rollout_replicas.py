"""Replicas: the GPUs that each uses, the sender that each vLLM worker meets, and what a generation gets from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode
from ppojob_trainer.engines.rollout.options import Capacity, Drafts
from ppojob_trainer.protocol import Keys
from ppojob_trainer.worker_groups.errors import WorkerFailedError
from ppojob_trainer.worker_groups.roles.gpu_holder import GpuHolder, NodePart
from ppojob_trainer.worker_groups.roles.rollout import Collected, RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import RolloutGroup
from ppojob_trainer.worker_groups.roles.trained import TrainedWorker
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from ppojob_trainer.worker_groups.stored_rows import StoredRows
from ppojob_trainer.worker_groups.table import Table
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


async def test_a_replica_receives_its_holders_gpus(replicas: Processes, holders: Processes) -> None:
    rollout = RolloutGroup(replicas_of(replicas, holders), spec_of({"actor": "train"}), "train")
    await rollout.begin_load()
    assert replicas.calls[RolloutWorker.begin_load] == [NodePart(["1"]), NodePart(["3"])]
    assert GpuHolder.begin_load not in holders.calls


async def test_a_replica_with_one_gpu_receives_no_others(replicas: Processes) -> None:
    await RolloutGroup(replicas_of(replicas), spec_of({"actor": "train"}), "train").begin_load()
    assert replicas.calls[RolloutWorker.begin_load] == [NodePart([]), NodePart([])]


async def test_of_a_replica_of_two_nodes_the_first_process_of_each_starts_the_part_there(replicas: Processes) -> None:
    # Two replicas of four GPUs, two on each node.
    holders = Processes(6, {GpuHolder.visible_gpu: lambda: ["1", "0", "1", "3", "2", "3"]})
    first, other = (EngineNode(0, 2, f"10.0.0.{number}", 1, 2, "token") for number in (1, 2))
    replicas.answers[RolloutWorker.meet] = lambda num_nodes: [first, other]
    replicas.answers[RolloutWorker.load] = lambda: [Capacity(8, 64)] * 2
    rollout = RolloutGroup(replicas_of(replicas, holders, num_nodes=2), spec_of({"actor": "train"}), "train")

    await rollout.begin_load()
    await rollout.load()

    assert replicas.calls[RolloutWorker.begin_load] == [NodePart(["1"], first), NodePart(["3"], other)]
    second, other_second = replace(first, index=1), replace(other, index=1)
    assert holders.calls[GpuHolder.begin_load] == [
        None, NodePart(["1"], second), None, None, NodePart(["3"], other_second), None,
    ]  # fmt: skip
    assert GpuHolder.load in holders.calls, "its workers on the other nodes may fail"
    assert rollout.workers_per_replica == 4


@pytest.mark.parametrize("is_first_lost", [False, True])
async def test_the_failure_of_another_node_explains_that_of_the_engine(
    replicas: Processes, *, is_first_lost: bool
) -> None:
    def failing(failure: Exception) -> Any:
        def answer() -> Any:
            raise failure

        return answer

    other = WorkerFailedError("rollout_gpu_holder rank 0 failed in load: CUDA out of memory")
    holders = Processes(2, {GpuHolder.load: failing(other)})
    if is_first_lost:
        replicas.answers[RolloutWorker.load] = failing(WorkerFailedError("rollout rank 0: connection closed by peer"))

    with pytest.raises(WorkerFailedError, match="CUDA out of memory"):
        await replicas_of(replicas, holders, num_nodes=2).load()


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


async def test_in_a_separate_pool_each_tensor_parallel_rank_has_its_own_sender(
    replicas: Processes, holders: Processes
) -> None:
    spec = spec_of({"actor": "train", "rollout": ["write"]})
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders)], spec)
    sent = await weights.connect()
    places = [
        [(link.address, number) for link, number in each] for each in replicas.calls[RolloutWorker.connect_weights]
    ]
    assert places == [[("rank 0", 1), ("rank 1", 1)], [("rank 0", 2), ("rank 1", 2)]]
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
    of_each = ["weights"] * len(replicas) + ["kv_cache"] * len(replicas)
    assert order == ["freed", "freed", *of_each], "in a pool of its own it does not sleep"


async def test_other_weights_than_were_sent_are_seen(replicas: Processes, holders: Processes) -> None:
    spec = spec_of({"actor": "train"})
    sender = actor(lambda version: receipt(version + 1))
    weights = WeightsGroup(as_group(sender), [group_of(spec, replicas, holders)], spec)
    with pytest.raises(WeightSyncError):
        await weights.push(1)


@pytest.mark.parametrize(
    ("placement", "senders"), [({"actor": "train"}, 4), ({"actor": "train", "rollout": ["write"]}, 2)]
)
async def test_the_rate_of_a_push_is_that_of_one_worker_however_many_send(
    replicas: Processes, holders: Processes, placement: dict[str, str], senders: int
) -> None:
    spec = spec_of(placement)
    weights = WeightsGroup(as_group(actor()), [group_of(spec, replicas, holders)], spec)

    moved = await weights.push(1)

    assert moved["comm_mb/update_weights"] == pytest.approx(senders * 8e-6)
    assert moved["comm_gb_per_s/update_weights"] * moved["comm_s/update_weights"] == pytest.approx(8e-9)


async def test_engines_in_a_pool_that_is_shared_have_other_senders_than_those_on_the_actors_gpus(
    replicas: Processes, holders: Processes
) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    shared = Processes(2, dict(replicas.answers))
    order: list[tuple[str, str]] = []
    for name, processes in (("own", replicas), ("shared", shared)):
        processes.answers[RolloutWorker.wake] = lambda tag, name=name: order.append((name, tag))
    groups = [group_of(spec, replicas, holders), RolloutGroup(replicas_of(shared, holders), spec, "write")]
    weights = WeightsGroup(as_group(actor()), groups, spec)

    await weights.connect()
    moved = await weights.push(1)

    assert places_told(replicas) == [[("rank 0", 1), ("rank 1", 1)], [("rank 2", 1), ("rank 3", 1)]]
    assert places_told(shared) == [[("rank 0", 1), ("rank 1", 1)], [("rank 0", 2), ("rank 1", 2)]]
    assert list(dict.fromkeys(order)) == [(name, tag) for tag in ("weights", "kv_cache") for name in ("own", "shared")]
    assert moved["comm_mb/update_weights"] == pytest.approx(6 * 8e-6)
    assert (moved["comm_receivers/update_weights"], moved["comm_read_back/update_weights"]) == (8, 8)
    assert weights.compared_version == 1

    shared.answers[RolloutWorker.update_weights] = lambda version: (
        [[replace(receipt(version), is_read_back=False)] * 2] * 2
    )
    await weights.push(2)
    assert weights.compared_version == 1, "not all engines compared version 2"


async def test_other_weights_in_a_pool_that_is_shared_are_seen(replicas: Processes, holders: Processes) -> None:
    spec = spec_of({"actor": "train", "critic": "write", "rollout": ["train", "write"]})
    answers = {
        RolloutWorker.update_weights: lambda version: [
            [receipt(version)] * 2,
            [receipt(version), receipt(version + 1)],
        ],
        RolloutWorker.connect_weights: lambda places: [[{}, {}], [{}, {}]],
    }
    shared = RolloutGroup(replicas_of(Processes(2, answers), holders), spec, "write")
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

    await RolloutGroup(replicas_of(engines), spec_of(placement), pool).begin(1, is_validation=is_validation).end()

    assert (RolloutWorker.sleep in engines.calls) is (shares and not is_validation)


async def test_a_replica_gets_its_prompts_under_their_numbers_and_reports_some_of_them() -> None:
    rows = StoredRows({}, 2, {Keys.RESPONSE_MASK: [3.0, 5.0]}, {})
    collected = Collected((7, 4), rows, Drafts(num_steps=6, num_drafted=2, num_accepted=3))
    engines = Processes(2, {RolloutWorker.collect: lambda num_rows: collected if num_rows == 2 else None})
    rollout = RolloutGroup(replicas_of(engines), spec_of({"actor": "train"}), "train")
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
    assert rollout.take_drafts() == collected.drafts
    assert rollout.take_drafts() == Drafts()
