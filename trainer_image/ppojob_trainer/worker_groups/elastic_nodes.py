"""The Ray nodes of an elastic pool, and places for engines on them.

    node A (2 GPUs, a replica has 1)    place (A, 0), place (A, 1)
    node B                              place (B, 0), place (B, 1)      B joins and leaves while the job runs

A pod of the pool is a Ray node with the pool's resource. Each place is a separate placement group, on one node: the
group of a whole pool would be rescheduled, or wait, as soon as one node leaves. Called by `roles.elastic_rollout`,
which decides when engines are started; this module starts nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from ppojob_api.v1alpha1.constants import POOL_RESOURCE_PREFIX
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError
from ppojob_trainer.worker_groups.placement import Bundle, PlacedPool, bundle_resources, gpu_fraction, is_placed

__all__ = ["ElasticNodes", "EnginePlace", "FoundNodes", "NodesOfPool"]

RESERVATION_S = 60.0
"""Seconds. The node has the resources and nothing else asks for them, so a longer wait means that it has left."""
_NODE_ID = "ray.io/node-id"
"""Ray's own label of each node."""


@dataclass(frozen=True)
class EnginePlace:
    """Where one engine can run: the n-th place of a node."""

    node_id: str
    index: int


@dataclass(frozen=True)
class FoundNodes:
    """The nodes of a pool at one moment: the number of pods that they stand for, and the places for engines on them."""

    num_pods: int
    places: Sequence[EnginePlace]


class ElasticNodes(Protocol):
    """What `elastic_rollout` needs of the nodes; the tests fake it."""

    async def find(self) -> FoundNodes:
        """Return the nodes that are there now."""
        ...

    async def reserve(self, place: EnginePlace) -> PlacedPool:
        """Reserve a place.

        Raises:
            PoolNotPlacedError: Ray did not reserve it in time.
        """
        ...


class NodesOfPool:
    """`ElasticNodes` of a pool in Ray."""

    def __init__(self, spec: PPOJobSpec, pool: str) -> None:
        self._spec, self._pool = spec, spec.pool(pool)
        self._size = spec.rollout.gpus_per_replica

    async def find(self) -> FoundNodes:
        """See `ElasticNodes`."""
        nodes = await asyncio.to_thread(ray.nodes)
        return self._found(nodes)

    def _found(self, nodes: Sequence[Mapping[str, Any]]) -> FoundNodes:
        name, each = POOL_RESOURCE_PREFIX + self._pool.name, self._pool.gpus_per_node
        sizes = {node["NodeID"]: int(node["Resources"].get(name, 0)) for node in nodes if node["Alive"]}
        # On one machine (`ppojob run`), a node stands for all pods of the pool.
        num_pods = sum(size // each for size in sizes.values())
        # A CPU engine uses all cores of its node, so a second one there would only compete for them.
        most = 1 if self._spec.device is Device.CPU else max(sizes.values(), default=0)
        places = [
            EnginePlace(node, index)
            for node, size in sorted(sizes.items())
            for index in range(min(most, size // self._size))
        ]
        return FoundNodes(num_pods, places)

    async def reserve(self, place: EnginePlace) -> PlacedPool:
        """See `ElasticNodes`."""
        bundles = [bundle_resources(self._spec, self._pool)] * self._size
        selector = [{_NODE_ID: place.node_id}] * self._size
        group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=selector)
        try:
            if not await is_placed(group, time.monotonic() + RESERVATION_S):
                raise PoolNotPlacedError(
                    f"Ray has not reserved {self._size} bundles of pool {self._pool.name} on node {place.node_id} "
                    f"within {RESERVATION_S:g} s: the node has left, or something else holds its resources"
                )
        except (PoolNotPlacedError, asyncio.CancelledError):
            remove_placement_group(group)
            raise
        reserved = tuple(Bundle(index, place.node_id) for index in range(self._size))
        return PlacedPool(self._pool.name, group, reserved, gpu_fraction(self._spec, self._pool.name))
