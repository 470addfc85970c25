"""Engines of an elastic pool: when they start, when they are admitted, what a loss leaves, and what ends the wait."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from ray.exceptions import ObjectLostError

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.errors import EngineLostError, RolloutError
from ppojob_trainer.engines.weights.plans import WeightLink
from ppojob_trainer.worker_groups.elastic_nodes import EnginePlace, FoundNodes, NodesOfPool
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError, WorkerFailedError, WorkerGroupError, WorkerLostError
from ppojob_trainer.worker_groups.roles import elastic_rollout
from ppojob_trainer.worker_groups.roles.elastic_rollout import ElasticRolloutGroup
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import Replicas
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from tests.unit.trainer.worker_groups.fake_processes import actor, as_group, receipt

LOST = WorkerLostError("rollout rank 0 was lost during collect: the actor died")
A, B, C = (EnginePlace(name, 0) for name in "abc")


def spec_of(min_nodes: int = 1, device: str = "CUDA", size: int = 1, gpus_per_node: int = 2) -> PPOJobSpec:
    spot = {"name": "spot", "gpusPerNode": gpus_per_node, "elastic": {"minNodes": min_nodes, "maxNodes": 4}}
    return resolve(
        parse_spec(
            {
                "image": "i",
                "device": device,
                "model": {"actor": {"path": "/m"}},
                "data": {"train": {"reasoningGym": {"task": "t"}}, "trainBatchSize": 256},
                "reward": {"function": {"module": "r"}},
                "pools": [{"name": "train", "gpusPerNode": 4}, spot],
                "placement": {"actor": "train", "rollout": ["spot"]},
                "rollout": {"tensorParallelSize": size},
                "trainer": {"phaseTimeoutSeconds": 60},
                "storage": {"claimName": "c"},
            }
        )
    )


@dataclass
class Nodes:
    """The nodes that are there, and the groups that were reserved on them."""

    places: list[EnginePlace] = field(default_factory=list)
    released: list[EnginePlace] = field(default_factory=list)
    unplaced: set[EnginePlace] = field(default_factory=set)

    async def find(self) -> FoundNodes:
        return FoundNodes(len(self.places), tuple(self.places))

    async def reserve(self, place: EnginePlace) -> Any:
        if place in self.unplaced:
            raise PoolNotPlacedError("the node has left")
        return _Reserved(self, place)


@dataclass
class _Reserved:
    nodes: Nodes
    place: EnginePlace

    def release(self) -> None:
        self.nodes.released.append(self.place)


class AllReplicas:
    """All replicas of a role. answers: of a method, by rank; an exception is raised."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, int], Any] = {}
        self.calls: list[tuple[str, int]] = []
        self.arguments: dict[Any, Any] = {}
        self.killed: list[int] = []

    def start(self, reserved: Any, rank: int) -> Replicas:
        return Replicas(cast("WorkerGroup[RolloutWorker]", Some(self, [rank])))


class Some:
    """Some of the replicas, as a group."""

    role = "rollout"

    def __init__(self, replicas: AllReplicas, ranks: list[int]) -> None:
        self._replicas, self.ranks = replicas, ranks

    def __len__(self) -> int:
        return len(self.ranks)

    def only(self, *ranks: int) -> Some:
        return Some(self._replicas, [self.ranks[rank] for rank in ranks])

    def extended_by(self, other: Some) -> Some:
        return Some(self._replicas, [*self.ranks, *other.ranks])

    async def addresses(self) -> list[str]:
        return ["address"] * len(self)

    def kill(self) -> None:
        self._replicas.killed += self.ranks

    def call(self, method: Any, *arguments: Any) -> asyncio.Future[Any]:
        found = asyncio.get_running_loop().create_future()
        self._replicas.arguments[method] = arguments
        self._replicas.calls += [(method.__name__, rank) for rank in self.ranks]
        default: Any = [receipt(arguments[0])] if method is RolloutWorker.update_weights else [{}]
        answers = [self._replicas.answers.get((method.__name__, rank), default) for rank in self.ranks]
        failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if failure is None:
            found.set_result(answers)
        else:
            found.set_exception(failure)
        return found


@dataclass
class Pool:
    nodes: Nodes
    replicas: AllReplicas
    rollout: ElasticRolloutGroup
    kept: list[Any] = field(default_factory=list)


def pool_of(min_nodes: int = 1, *places: EnginePlace) -> Pool:
    nodes, replicas = Nodes(list(places)), AllReplicas()
    kept: list[Any] = []

    async def keep(table: Any) -> Any:
        if isinstance(table, Exception):
            raise table
        kept.append(table)
        return f"copy of {table}"

    none = cast("WorkerGroup[RolloutWorker]", Some(replicas, []))
    rollout = ElasticRolloutGroup(spec_of(min_nodes), "spot", nodes, replicas.start, none, keep)
    return Pool(nodes, replicas, rollout, kept)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_rollout, "POLL_S", 0.0)
    monkeypatch.setattr(elastic_rollout, "PAUSE_S", 0.0)


async def watched(pool: Pool) -> None:
    """Let the pool look at its nodes until all that starts has started."""
    task = asyncio.create_task(pool.rollout.watch())
    for _ in range(200):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def failed(cause: Exception) -> WorkerFailedError:
    error = WorkerFailedError(f"rollout rank 0 failed: {cause}")
    error.__cause__ = cause
    return error


async def test_at_the_start_all_nodes_get_an_engine_and_the_pool_waits_for_its_smallest_number() -> None:
    pool = pool_of(2, A)
    loading = asyncio.create_task(pool.rollout.load())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not loading.done()

    pool.nodes.places += [B, C]
    await loading

    assert pool.rollout.ranks == [0, 1, 2]
    assert pool.rollout.engines.keys() == {0, 1, 2}


async def test_an_engine_that_cannot_start_fails_the_attempt_only_at_the_start() -> None:
    pool, failure = pool_of(1, A), failed(RolloutError("no argument of this name"))
    pool.replicas.answers["load", 0] = failure
    with pytest.raises(WorkerFailedError) as found:
        await pool.rollout.load()
    assert found.value is failure

    pool = pool_of(1, A)
    await pool.rollout.load()
    pool.replicas.answers["load", 1] = failure
    pool.nodes.places.append(B)
    await watched(pool)
    pool.rollout.admit()
    assert pool.rollout.ranks == [0, 2], "it was started again"
    assert pool.replicas.killed == [1]
    assert pool.nodes.released == [B]


@pytest.mark.parametrize("failure", [LOST, failed(EngineLostError("vLLM exited"))])
async def test_a_node_that_leaves_while_its_engine_starts_is_left_out(failure: WorkerGroupError) -> None:
    pool = pool_of(1, A, B, C)
    pool.nodes.unplaced = {C}
    pool.replicas.answers["load", 1] = failure
    loading = asyncio.create_task(pool.rollout.load())
    await asyncio.sleep(0)
    pool.nodes.places.remove(B)
    await loading

    assert pool.rollout.engines.keys() == {0}
    assert pool.nodes.released == [B]


async def test_an_engine_joins_at_the_next_push_and_a_lost_one_leaves_its_place_to_another() -> None:
    pool = pool_of(1, A)
    await pool.rollout.load()
    pool.nodes.places.append(B)
    await watched(pool)
    assert pool.rollout.ranks == [0], "it has no weights yet"
    pool.rollout.admit()
    assert pool.rollout.ranks == [0, 1]
    assert pool.rollout.engines.keys() == {0}, "it gets weights, and a generation that runs must not use it yet"
    pool.rollout.use_admitted()
    assert pool.rollout.engines.keys() == {0, 1}

    pool.rollout.lose(0, LOST)

    assert pool.rollout.engines.keys() == {1}
    assert (pool.replicas.killed, pool.nodes.released, pool.rollout.num_lost) == ([0], [A], 1)
    await watched(pool)
    pool.rollout.admit()
    assert pool.rollout.ranks == [1, 2], "a number is never used again"


async def test_a_place_rests_before_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_rollout, "PAUSE_S", 1000.0)
    pool = pool_of(1, A, B)
    await pool.rollout.load()

    pool.rollout.lose(0, LOST)
    pool.nodes.places.append(C)
    await watched(pool)
    pool.rollout.admit()

    assert pool.rollout.ranks == [1, 2]
    assert len(pool.nodes.places) == 3, "place A waits"


async def test_what_an_engine_reported_is_copied_and_is_not_lost_with_it() -> None:
    pool = pool_of(1, A, B)
    await pool.rollout.load()
    assert await pool.rollout.kept(0, cast("Any", "rows")) == "copy of rows"
    assert pool.rollout.keeps_responses

    lost = failed(ObjectLostError("ab" * 28, None, ""))  # type: ignore[no-untyped-call]
    with pytest.raises(WorkerLostError, match="rank 0 was lost before its responses were copied"):
        await pool.rollout.kept(0, cast("Any", lost))
    other = failed(RuntimeError("no room"))
    with pytest.raises(WorkerFailedError):
        await pool.rollout.kept(0, cast("Any", other))


async def test_the_weights_are_connected_again_for_engines_that_join_and_for_those_that_leave() -> None:
    pool, sender = pool_of(1, A), actor()
    weights = WeightsGroup(as_group(sender), [pool.rollout], spec_of())
    await pool.rollout.load()
    await weights.connect()
    sender.calls.clear()
    await weights.push(1)
    assert sender.calls.keys().isdisjoint({"open_weights"})
    num_opened = len([name for name, _ in pool.replicas.calls if name == "connect_weights"])
    assert num_opened == 1

    pool.nodes.places.append(B)
    await watched(pool)
    await weights.push(2)
    assert places_told_of(pool) == [[("rank 0", 1)], [("rank 0", 2)]]
    assert pool.rollout.engines.keys() == {0, 1}

    pool.replicas.answers["check", 0] = LOST
    await weights.push(3)
    assert places_told_of(pool) == [[("rank 0", 1)]]
    assert pool.rollout.ranks == [1]


def places_told_of(pool: Pool) -> Any:
    [told] = pool.replicas.arguments[RolloutWorker.connect_weights]
    return [[(one.address, number) for one, number in each] for each in told]


async def test_an_engine_that_is_lost_in_a_push_costs_one_more_push(
    caplog: pytest.LogCaptureFixture, broken_off: list[WeightLink]
) -> None:
    pool, sender = pool_of(1, A, B), actor()
    weights = WeightsGroup(as_group(sender), [pool.rollout], spec_of())
    await pool.rollout.load()
    await weights.connect()
    pool.replicas.answers |= {("update_weights", 1): LOST, ("check", 1): LOST}
    weights_of_first = len([call for call in pool.replicas.calls if call == ("update_weights", 0)])

    # The first question finds both engines: the second one is lost afterwards.
    found = pool.replicas.answers.pop(("check", 1))
    update = pool.replicas.answers[("update_weights", 1)]
    assert update is LOST
    original = pool.rollout.find_lost

    async def find_lost() -> None:
        await original()
        pool.replicas.answers["check", 1] = found

    pool.rollout.find_lost = find_lost  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        await weights.push(1)

    assert pool.rollout.ranks == [0]
    assert "the weights are sent again, without the engines that were lost meanwhile" in caplog.text
    assert [(link.address, link.num_receivers) for link in broken_off] == [("rank 0", 2)], "the actor would wait"
    again = len([call for call in pool.replicas.calls if call == ("update_weights", 0)])
    assert again == weights_of_first + 2


async def test_a_push_that_fails_without_a_loss_is_not_repeated() -> None:
    pool, sender = pool_of(1, A), actor()
    weights = WeightsGroup(as_group(sender), [pool.rollout], spec_of())
    await pool.rollout.load()
    await weights.connect()
    failure = pool.replicas.answers["update_weights", 0] = failed(RolloutError("broken weights"))

    with pytest.raises(WorkerFailedError) as found:
        await weights.push(1)

    assert found.value is failure


async def test_a_push_waits_for_an_engine_and_names_the_pools_where_none_comes() -> None:
    pool, sender = pool_of(1, A), actor()
    weights = WeightsGroup(as_group(sender), [pool.rollout], spec_of())
    await pool.rollout.load()
    await weights.connect()
    pool.rollout.lose(0, LOST)
    pool.nodes.places = []
    watching = asyncio.create_task(pool.rollout.watch())
    pushing = asyncio.create_task(weights.push(1))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not pushing.done()
    pool.nodes.places = [B]
    await pushing
    assert pool.rollout.ranks == [1]

    pool.rollout.lose(1, LOST)
    pool.nodes.places = []
    weights._wait_s = 0.01
    with pytest.raises(WorkerLostError, match=r"none came back to the elastic pools spot within 0.01 s .* rank 0 was"):
        await weights.push(2)
    watching.cancel()


@pytest.mark.parametrize(
    ("device", "size", "gpus", "sizes", "pods", "places"),
    [
        (Device.CUDA, 1, 2, [2, 2], 2, 4),
        (Device.CUDA, 2, 4, [4, 0], 1, 2),
        # On one machine, a node stands for all pods.
        (Device.CUDA, 1, 1, [3], 3, 3),
        (Device.CPU, 1, 1, [3], 3, 1),
        (Device.CPU, 1, 2, [2, 2], 2, 2),
    ],
)
def test_places_follow_from_the_resources_of_the_nodes(
    device: Device, size: int, gpus: int, sizes: list[int], pods: int, places: int
) -> None:
    nodes = NodesOfPool(spec_of(device=device.value, size=size, gpus_per_node=gpus), "spot")
    here = [
        {"NodeID": str(number), "Alive": True, "Resources": {"pool_spot": float(size)}}
        for number, size in enumerate(sizes)
    ]
    gone = {"NodeID": "gone", "Alive": False, "Resources": {"pool_spot": 8.0}}
    other = {"NodeID": "head", "Alive": True, "Resources": {"CPU": 8.0}}

    found = nodes._found([*here, gone, other])

    assert (found.num_pods, len(found.places)) == (pods, places)
