"""Lists other sizes that a job's pools could have. Pure; called by `recommendation`.

A candidate has fewer GPUs in one pool, more GPUs in one pool, or some GPUs moved from one pool to another. A pool of
several nodes grows and shrinks by nodes. A pool of one node grows and shrinks by GPUs, up to the GPUs of a node; with
device CPU by nodes, because the workers of a node share its cores. Candidates must be valid, for example divisible by
tensorParallelSize x sequenceParallelSize x pipelineParallelSize. They range from half to double the current size: the
cost model of one layout is not reliable beyond that. Whether the cluster has the GPUs is not checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec

__all__ = ["fewer", "more", "moved", "total_gpus"]

LARGEST_NODE: Final = 8
"""The most GPUs that a node has, on nearly all machines."""


@dataclass(frozen=True)
class _Size:
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def fewer(spec: PPOJobSpec) -> Iterator[list[Pool]]:
    """Yield the pools with fewer GPUs in one of them, for each valid size."""
    for index, pool in enumerate(spec.pools):
        for size in _smaller(pool, spec.device):
            yield from _allowed(spec, _with(spec.pools, {index: size}))


def more(spec: PPOJobSpec) -> Iterator[list[Pool]]:
    """Yield the pools with more GPUs in one of them: for each pool the smallest valid increase."""
    for index, pool in enumerate(spec.pools):
        grown = (
            pools for size in _larger(pool, spec.device) for pools in _allowed(spec, _with(spec.pools, {index: size}))
        )
        yield from list(grown)[:1]


def moved(spec: PPOJobSpec) -> Iterator[list[Pool]]:
    """Yield the pools with the same total of GPUs, some of them moved from one pool to another."""
    for (giver, giving), (taker, taking) in itertools.permutations(enumerate(spec.pools), 2):
        larger = {size.gpus - taking.gpus: size for size in _larger(taking, spec.device)}
        for small in _smaller(giving, spec.device):
            large = larger.get(giving.gpus - small.gpus)
            if large is not None:
                yield from _allowed(spec, _with(spec.pools, {giver: small, taker: large}))


def total_gpus(pools: Sequence[Pool]) -> int:
    """Return the GPUs of all pools."""
    return sum(pool.gpus for pool in pools)


def _smaller(pool: Pool, device: Device) -> list[_Size]:
    """Return sizes down to half the current one."""
    if pool.nodes > 1 or device is Device.CPU:
        return [_Size(nodes, pool.gpus_per_node) for nodes in range((pool.nodes + 1) // 2, pool.nodes)]
    return [_Size(1, gpus) for gpus in range((pool.gpus_per_node + 1) // 2, pool.gpus_per_node)]


def _larger(pool: Pool, device: Device) -> list[_Size]:
    """Return sizes up to double the current one, the smallest first."""
    if pool.nodes == 1 and pool.gpus_per_node < LARGEST_NODE and device is Device.CUDA:
        return [_Size(1, gpus) for gpus in range(pool.gpus_per_node + 1, min(2 * pool.gpus_per_node, LARGEST_NODE) + 1)]
    return [_Size(nodes, pool.gpus_per_node) for nodes in range(pool.nodes + 1, 2 * pool.nodes + 1)]


def _with(pools: Sequence[Pool], sizes: dict[int, _Size]) -> list[Pool]:
    return [
        pool.model_copy(update={"nodes": size.nodes, "gpus_per_node": size.gpus_per_node})
        if (size := sizes.get(index)) is not None
        else pool
        for index, pool in enumerate(pools)
    ]


def _allowed(spec: PPOJobSpec, pools: list[Pool]) -> Iterator[list[Pool]]:
    if next(check(spec.model_copy(update={"pools": pools})), None) is None:
        yield pools
