"""Reserves bundles for a PPOJob's pools, in which role processes are started.

Each pool becomes one placement group with one bundle for each GPU (with device CPU: for each worker). The bundles
request the pool's Ray resource, so they are placed on the pool's pods. Roles that share a pool share every bundle, on
cuda by fractions of its GPU. Called by `main` at start. Ray waits forever, without a message, for a group that can
never be placed; this module waits with a time limit and reports the missing resources.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ppojob_api.v1alpha1.constants import POOL_RESOURCE_PREFIX
from ppojob_api.v1alpha1.pools import Pool, Role
from ppojob_api.v1alpha1.resolve import reward_workers, roles
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError
from ppojob_trainer.worker_groups.survivors import NO_SURVIVORS, Survivors

__all__ = [
    "CPUS_PER_PROCESS",
    "Bundle",
    "PlacedPool",
    "are_connected",
    "bundle_resources",
    "explain_shortage",
    "gpu_fraction",
    "is_placed",
    "place",
]

logger = logging.getLogger(__name__)

CPUS_PER_PROCESS = 0.001
"""CPUs that a role process requests from Ray. They are only for scheduling: a pod may request 0.3 of a core, and
hundreds of reward processes must fit."""

_GPU_ROLES = (Role.ACTOR, Role.ROLLOUT, Role.REF, Role.CRITIC)


@dataclass(frozen=True)
class Bundle:
    """A place for processes: one GPU's worth of a pool, on one node."""

    index: int
    node_id: str


@dataclass(frozen=True)
class PlacedPool:
    """A pool whose bundles are reserved, in the order of ranks: the bundles of a node are consecutive."""

    name: str
    group: PlacementGroup
    bundles: tuple[Bundle, ...]
    gpu_fraction: float

    def strategy(self, bundle: Bundle) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy that places an actor in the bundle."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle.index)

    def one_per_node(self) -> tuple[Bundle, ...]:
        """Return the first bundle of each node."""
        first = {bundle.node_id: bundle for bundle in reversed(self.bundles)}
        return tuple(bundle for bundle in self.bundles if first[bundle.node_id] is bundle)

    def in_replicas(self, size: int, *, is_on_cpu: bool = False) -> tuple[tuple[Bundle, ...], ...]:
        """Return the bundles of each replica: `size` of them on one node, or all bundles of some nodes.

        Args:
            is_on_cpu: a replica has one bundle on each of `size` nodes, because an engine uses all cores of its node.
                On one machine (`ppojob run`), where a node stands for all nodes of the pool, they are on that node.

        Raises:
            PoolNotPlacedError: a replica would have a part of a node beside another node, or unequal parts.
        """
        bundles = self.one_per_node() if is_on_cpu else self.bundles
        if is_on_cpu and len(bundles) == 1:
            bundles = self.bundles[:size]
        replicas = tuple(bundles[first : first + size] for first in range(0, len(bundles), size))
        for replica in replicas:
            parts = Counter(bundle.node_id for bundle in replica)
            if len(replica) < size or len(set(parts.values())) > 1:
                numbers = ", ".join(str(bundle.index) for bundle in replica)
                raise PoolNotPlacedError(
                    f"Ray has placed the bundles {numbers} of pool {self.name} on {len(parts)} nodes, "
                    f"{sorted(parts.values())} on each, and an engine of {size} needs them on one node, or as many on "
                    "each of its nodes: check that each pod of the pool offers Ray as many GPUs as gpusPerNode"
                )
        return replicas

    def release(self) -> None:
        """Release the bundles; processes that still run in them are terminated."""
        remove_placement_group(self.group)


async def place(spec: PPOJobSpec, timeout_s: float, survivors: Survivors = NO_SURVIVORS) -> dict[str, PlacedPool]:
    """Reserve the bundles of all pools that have a role, without those of elastic pools (`elastic_nodes`).

    Pools in which processes of an earlier attempt continue (`survivors`) have their bundles.

    Raises:
        PoolNotPlacedError: a pool was not reserved within `timeout_s`; names the pool and the missing resources.
    """
    pools = {pool.name: pool for _, pool in roles(spec)}
    pools |= {worker.pool: spec.pool(worker.pool) for worker in spec.workers}
    # Request all pools before waiting for the first: `timeout_s` is for all of them together, not for each.
    groups = {
        name: survivors.groups.get(name) or _ask(spec, pool, survivors.pool_options(name))
        for name, pool in pools.items()
        if pool.elastic is None
    }
    deadline = time.monotonic() + timeout_s
    placed: dict[str, PlacedPool] = {}
    try:
        for name, group in groups.items():
            if not await is_placed(group, deadline):
                raise PoolNotPlacedError(
                    explain_shortage(pools[name], bundle_resources(spec, pools[name]), timeout_s, *_cluster_state())
                )
            placed[name] = PlacedPool(name, group, _in_order_of_nodes(group), gpu_fraction(spec, name))
    except (PoolNotPlacedError, asyncio.CancelledError):
        for group in groups.values():
            remove_placement_group(group)
        raise
    for pool in placed.values():
        nodes = len({bundle.node_id for bundle in pool.bundles})
        logger.info("pool %s: %d bundles on %d nodes", pool.name, len(pool.bundles), nodes)
    return placed


def are_connected(pools: Iterable[PlacedPool]) -> bool:
    """Return whether all nodes with bundles of these pools are alive."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    return all(bundle.node_id in alive for pool in pools for bundle in pool.bundles)


def bundle_resources(spec: PPOJobSpec, pool: Pool) -> dict[str, float]:
    """Return the Ray resources of each of the pool's bundles."""
    in_pool = [role for role, placed in roles(spec) if placed.name == pool.name]
    # Each role at most once per bundle, the data worker, and the user-defined workers spread over the bundles.
    processes = len(in_pool) + 1
    processes += math.ceil(reward_workers(spec).get(pool.name, 0) / pool.gpus)
    processes += sum(math.ceil(worker.num_workers / pool.gpus) for worker in spec.workers if worker.pool == pool.name)
    resources = {POOL_RESOURCE_PREFIX + pool.name: 1.0, "CPU": round(processes * CPUS_PER_PROCESS, 4)}
    return {**resources, "GPU": 1.0} if spec.device is Device.CUDA else resources


def gpu_fraction(spec: PPOJobSpec, pool_name: str) -> float:
    """Return the fraction of a GPU of the pool that each role and each user process gets; 0 with device CPU."""
    gpu_roles = {*_GPU_ROLES, Role.REWARD} if spec.reward.uses_model else set(_GPU_ROLES)
    if spec.model.reference_is_actor:
        gpu_roles.remove(Role.REF)
    sharing = sum(pool.name == pool_name and role in gpu_roles for role, pool in roles(spec))
    for worker in spec.workers:
        if worker.uses_gpu and worker.pool == pool_name:
            sharing += math.ceil(worker.num_workers / spec.pool(pool_name).gpus)
    if spec.device is not Device.CUDA or not sharing:
        return 0.0
    # Rounded down: three times 0.3334 would not fit.
    return math.floor(1000 / sharing) / 1000


def explain_shortage(
    pool: Pool,
    bundle: Mapping[str, float],
    waited_s: float,
    total: Mapping[str, float],
    free: Mapping[str, float],
) -> str:
    """Return a message why the pool's bundles do not fit into a cluster with these resources.

    Args:
        total, free: Ray's resources of the whole cluster.
    """
    short = list(_short_of(bundle, pool.gpus, total, free))
    why = "; ".join(short) or "the cluster has enough of each resource, but no single node has enough of all of them"
    return (
        f"pool {pool.name} requests {pool.gpus} bundles of {_shown(bundle)}, and Ray has not placed them within "
        f"{waited_s:g} s: {why}. "
        f"Check that all {pool.nodes} pods of the pool have joined Ray, and that nothing else holds their resources"
    )


def _short_of(
    bundle: Mapping[str, float], count: int, total: Mapping[str, float], free: Mapping[str, float]
) -> Iterator[str]:
    for name, amount in bundle.items():
        wanted, there, left = amount * count, total.get(name, 0.0), free.get(name, 0.0)
        if there < wanted:
            yield f"the cluster has {there:g} {name}, and {wanted:g} are needed"
        elif left < wanted:
            yield f"{left:g} of the cluster's {there:g} {name} are free, and {wanted:g} are needed"


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _ask(spec: PPOJobSpec, pool: Pool, options: Mapping[str, str]) -> PlacementGroup:
    bundles = [bundle_resources(spec, pool)] * pool.gpus
    return cast(PlacementGroup, placement_group(bundles, strategy="PACK", **options))


async def is_placed(group: PlacementGroup, deadline: float) -> bool:
    """Wait for a placement group until the deadline, polling every second, so that a stop request is not blocked."""
    while not await asyncio.to_thread(group.wait, 1):
        if time.monotonic() >= deadline:
            return False
    return True


def _cluster_state() -> tuple[dict[str, float], dict[str, float]]:
    return ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]


def _in_order_of_nodes(group: PlacementGroup) -> tuple[Bundle, ...]:
    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    order = _first_seen(nodes[index] for index in sorted(nodes))
    return tuple(Bundle(index, nodes[index]) for index in sorted(nodes, key=lambda at: (order.index(nodes[at]), at)))


def _first_seen(names: Iterable[str]) -> Sequence[str]:
    return list(dict.fromkeys(names))
