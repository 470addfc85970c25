"""Pools of several nodes, as the operator's pods make them: a Ray node for each pod, and a head without GPUs.

Two pools of two pods with two workers each. On which host a pod is, Ray does not see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.main.connection import connected
from ppojob_trainer.worker_groups.connections import between_pools, connection_metrics
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.placement import PlacedPool, place
from tests.bad_specs import GOOD
from tests.integration.trainer.ray_clusters import new_cluster, started
from tests.integration.trainer.ray_workers import SumWorker

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

IMPORTABLE = {"PYTHONPATH": str(Path(__file__).parent)}
LIMIT_S = 120.0


def spec_of(actor_nodes: int) -> PPOJobSpec:
    pools = [
        {"name": "actor", "nodes": actor_nodes, "gpusPerNode": 2},
        {"name": "critic", "nodes": 2, "gpusPerNode": 2},
    ]
    return resolve(parse_spec({**GOOD["spec"], "device": "CPU", "pools": pools}))


@pytest.fixture(scope="module")
def pods() -> Iterator[dict[str, list[str]]]:
    """The Ray nodes of each pool's pods; the pools' pods join by turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = new_cluster(num_cpus=0)
        try:
            nodes: dict[str, list[str]] = {"actor": [], "critic": []}
            for name in ("actor", "critic") * 2:
                pod = partial(cluster.add_node, num_cpus=2, resources={f"pool_{name}": 2})
                nodes[name].append(started(pod).node_id)
            patch.setenv("RAY_ADDRESS", cluster.address)
            with connected(spec_of(actor_nodes=2)):
                yield nodes
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def pools(pods: dict[str, list[str]]) -> Iterator[dict[str, PlacedPool]]:
    placed = asyncio.run(place(spec_of(actor_nodes=2), LIMIT_S))
    yield placed
    for pool in placed.values():
        pool.release()


def test_a_pools_ranks_lie_side_by_side_on_its_own_pods(
    pods: dict[str, list[str]], pools: dict[str, PlacedPool], tmp_path: Path
) -> None:
    launcher = Launcher(tmp_path, LIMIT_S)
    groups = {
        name: launcher.start(name, SumWorker, pool, pool.bundles, environment=IMPORTABLE)
        for name, pool in pools.items()
    }

    async def places() -> dict[str, list[tuple[str, int]]]:
        await wait_until_up(list(groups.values()))
        return {name: await group.call(SumWorker.place) for name, group in groups.items()}

    for name, found in asyncio.run(places()).items():
        first, second, third, fourth = (node for node, _ in found)
        assert first == second != third == fourth, name
        assert {first, third} == set(pods[name]), name
        assert [local for _, local in found] == [2, 2, 2, 2], name
    for group in groups.values():
        group.kill()


def test_engines_find_their_gpus_on_one_node_or_on_whole_nodes(pools: dict[str, PlacedPool]) -> None:
    pool = pools["actor"]

    assert [len({bundle.node_id for bundle in replica}) for replica in pool.in_replicas(2)] == [1, 1]
    assert [len({bundle.node_id for bundle in replica}) for replica in pool.in_replicas(4)] == [2]
    assert len(pool.one_per_node()) == 2
    with pytest.raises(PoolNotPlacedError, match=r"on 2 nodes, \[1, 2\] on each, and an engine of 3"):
        pool.in_replicas(3)


def test_batches_between_pools_of_separate_pods_go_over_tcp(pools: dict[str, PlacedPool]) -> None:
    assert connection_metrics(between_pools(pools.values())) == {"comm_transport/pools/actor_and_critic/RAY_TCP": 4.0}


@pytest.mark.usefixtures("pods")
def test_a_pod_that_is_missing_is_said_in_numbers() -> None:
    with pytest.raises(PoolNotPlacedError, match=r"pool actor wants 6 bundles .* the cluster has 4 pool_actor, wanted"):
        asyncio.run(place(spec_of(actor_nodes=3), 3))


def test_ray_is_one_cluster_of_five_nodes(pods: dict[str, list[str]]) -> None:
    assert len(ray.nodes()) == 1 + sum(map(len, pods.values()))
