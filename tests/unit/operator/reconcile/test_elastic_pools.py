"""Pods of an elastic pool come and go: the trainer starts with the fewest, and no attempt ends for lost ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Pod, Ray, Trouble
from tests.unit.operator.reconcile.worlds import World, first_cluster

POOLS: list[dict[str, Any]] = [
    {"name": "actor", "gpusPerNode": 2},
    {"name": "spot", "gpusPerNode": 2, "elastic": {"minNodes": 2, "maxNodes": 4}},
]
PLACEMENT = {"actor": "actor", "rollout": ["actor", "spot"]}
NO_GPUS = Trouble(Reason.INSUFFICIENT_GPUS, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
SPOT_RECLAIM = Trouble(Reason.PREEMPTED, "the node's spot instance is reclaimed")


def elastic(**policy: Any) -> World:
    return World(pools=POOLS, placement=PLACEMENT, **({"runPolicy": policy} if policy else {}))


def with_spot_pods(world: World, num_ready: int, num_pending: int = 0) -> World:
    """Give the world a head, the actor's pod, and these pods of the elastic pool."""
    world.pods_become(ready=True)
    name = world.cluster_name
    others = tuple(pod for pod in world.observed.pods if pod.pool != "spot")
    ready = (Pod(f"{name}-spot-{world.generation}-{n}", name, "spot", True) for n in range(num_ready))
    pending = (Pod(f"{name}-spot-pending-{n}", name, "spot", False, trouble=NO_GPUS) for n in range(num_pending))
    return world.see(pods=(*others, *ready, *pending))


def running(num_ready: int = 2, num_pending: int = 2, **policy: Any) -> World:
    world = with_spot_pods(elastic(**policy).settle(), num_ready, num_pending).see(ray=Ray()).settle()
    world.wait(20).trainer_reports()
    return world.settle()


def spot(world: World) -> dict[str, Any]:
    return next(pool for pool in world.status["pools"] if pool["name"] == "spot")


def test_the_trainer_starts_with_the_fewest_pods_and_the_others_are_awaited() -> None:
    world = with_spot_pods(elastic().settle(), num_ready=1, num_pending=3).see(ray=Ray())

    assert world.look().submission is None
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.INSUFFICIENT_GPUS)

    world = with_spot_pods(world, num_ready=2, num_pending=2)
    assert world.look().submission is not None
    world.settle()
    assert world.verdict(Condition.POOLS_READY) == ("True", Reason.PODS_READY)
    assert "pool spot, which is elastic, has 2 of 4" in world.condition(Condition.POOLS_READY).message
    assert world.status["ready"] == "6/10"
    assert (spot(world)["readyNodes"], spot(world)["desiredNodes"]) == (2, 4)
    assert "Insufficient nvidia.com/gpu" in spot(world)["message"]


@pytest.mark.parametrize("num_left", [3, 1, 0])
def test_lost_pods_of_an_elastic_pool_cost_no_attempt(num_left: int) -> None:
    world = with_spot_pods(running(num_ready=4, num_pending=0), num_left).settle()

    for _ in range(20):
        world.wait(30).trainer_reports().settle()

    assert (world.status["attempt"], world.status["phase"]) == (0, "Running")
    assert world.status["retries"]["total"] == 0
    assert world.status["ready"] == f"{2 + 2 * num_left}/10"
    ready = world.verdict(Condition.POOLS_READY)
    assert ready == (("True", Reason.PODS_READY) if num_left >= 2 else ("False", Reason.WAITING_FOR_PODS))
    assert world.status["avoidedNodes"] == [] if "avoidedNodes" in world.status else True


def test_a_pod_that_its_node_takes_away_is_no_disruption_of_the_attempt() -> None:
    world = running(num_ready=3, num_pending=0)
    pods = [
        replace(pod, is_ready=False, is_deleting=True, disruption=SPOT_RECLAIM, node="spot-1")
        if pod.pool == "spot"
        else pod
        for pod in world.observed.pods
    ]

    for _ in range(10):
        world.see(pods=tuple(pods)).wait(30).trainer_reports().settle()

    assert world.status["attempt"] == 0
    assert Reason.PREEMPTED not in world.said


def test_an_elastic_pod_without_memory_is_no_failure_but_one_of_another_pool_is() -> None:
    starved = Trouble(Reason.OUT_OF_MEMORY, "container ray-worker exceeded its memory limit", "ray-worker", 137)
    for pool, attempt in (("spot", 0), ("actor", 1)):
        world = running(num_ready=3, num_pending=0)
        pods = (
            replace(pod, is_ready=False, trouble=starved, out_of_memory=starved) if pod.pool == pool else pod
            for pod in world.observed.pods
        )
        world.see(pods=tuple(pods)).wait(31).trainer_reports().settle()
        assert world.status["attempt"] == attempt, pool


def test_a_trainer_that_gives_up_waiting_for_engines_is_a_failure_of_the_cluster() -> None:
    world = with_spot_pods(running(), 0)
    words = "no engine was left, and none came back to the elastic pools spot within 1790 s"

    world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE, words).settle()

    assert world.status["retries"]["infrastructure"] == 1
    assert words in world.status["lastFailure"]["message"]


def test_other_bounds_apply_to_the_running_job() -> None:
    world = running()
    [cluster] = world.observed.clusters
    world.see(clusters=(replace(cluster, spec=world.made[-1]["spec"]),)).settle()
    assert Reason.POOL_RESIZED not in world.said

    world.edit(pools=[POOLS[0], {**POOLS[1], "elastic": {"minNodes": 1, "maxNodes": 6}}])
    plan = world.look()

    [changed] = [manifest for manifest in plan.apply if manifest["kind"] == "RayCluster"]
    group = changed["spec"]["workerGroupSpecs"][1]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 6, 6)
    assert changed["metadata"]["name"] == first_cluster()
    assert "pool spot requests 6 pods, at least 1" in world.words
    world.see(clusters=(replace(cluster, spec=changed["spec"], generation=2),)).settle()
    assert (world.status["attempt"], world.status["ready"]) == (0, "6/14")
    assert world.said.count(Reason.POOL_RESIZED) == 1
    assert not {Reason.REALLOCATING, Reason.CLUSTER_RESTORED} & set(world.said)
    assert world.status["effectiveLayout"]["pools"][1]["elastic"] == {"minNodes": 1, "maxNodes": 6}


def test_in_a_queue_other_bounds_are_another_layout() -> None:
    world = elastic(queueName="gpus").settle()
    world.see(clusters=tuple(replace(each, is_suspended=False) for each in world.observed.clusters))
    with_spot_pods(world, 2, 2).see(ray=Ray()).settle()
    world.wait(20).trainer_reports().settle()

    world.edit(pools=[POOLS[0], {**POOLS[1], "elastic": {"minNodes": 1, "maxNodes": 6}}]).settle()

    assert Reason.REALLOCATING in world.said


def test_a_pool_that_becomes_elastic_is_another_layout() -> None:
    world = World(pools=[POOLS[0], {"name": "spot", "gpusPerNode": 2}], placement=PLACEMENT).run()

    world.edit(pools=POOLS).settle()

    assert Reason.REALLOCATING in world.said
