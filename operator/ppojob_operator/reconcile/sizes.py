"""Merges the pool sizes of autoBalance into the spec. Pure.

`reading` and `balance` call it. An edit of a pool's nodes, or turning autoBalance off, reverts the sizes.
"""

from collections.abc import Mapping, Sequence

from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool


def with_nodes(spec: PPOJobSpec, nodes: Mapping[str, int]) -> PPOJobSpec:
    """Return the spec with these numbers of nodes, by pool."""
    pools = [pool.model_copy(update={"nodes": nodes.get(pool.name, pool.nodes)}) for pool in spec.pools]
    return spec.model_copy(update={"pools": pools})


def in_force(spec: PPOJobSpec, moved: Sequence[EffectivePool]) -> list[EffectivePool]:
    """Return the resized pools that are still valid for the user's spec."""
    if not spec.auto_balance.enabled:
        return []
    written = {pool.name: pool for pool in spec.pools}
    return [each for each in moved if each.name in written and each.spec_nodes == written[each.name].nodes]


def with_moved(spec: PPOJobSpec, moved: Sequence[EffectivePool]) -> PPOJobSpec:
    """Return the user's spec with the resized pools, if that is valid."""
    if not moved:
        return spec
    other = with_nodes(spec, {each.name: each.nodes for each in moved})
    # Bounds and sizes may have been edited since.
    return spec if any(check(other)) else other
