"""The spec with other numbers of nodes: what autoBalance has moved, laid over what the user wrote. Pure.

`reading` and `balance` call it. An edit of a pool's nodes, and switching autoBalance off, undo what was moved.
"""

from collections.abc import Mapping, Sequence

from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool


def with_nodes(spec: PPOJobSpec, nodes: Mapping[str, int]) -> PPOJobSpec:
    """Return the spec with other nodes in the pools that are named."""
    pools = [pool.model_copy(update={"nodes": nodes.get(pool.name, pool.nodes)}) for pool in spec.pools]
    return spec.model_copy(update={"pools": pools})


def in_force(spec: PPOJobSpec, moved: Sequence[EffectivePool]) -> list[EffectivePool]:
    """Return what was moved and still counts, for a spec as the user wrote it."""
    if not spec.auto_balance.enabled:
        return []
    written = {pool.name: pool for pool in spec.pools}
    return [each for each in moved if each.name in written and each.spec_nodes == written[each.name].nodes]


def with_moved(spec: PPOJobSpec, moved: Sequence[EffectivePool]) -> PPOJobSpec:
    """Return the spec as the operator is to run it."""
    if not moved:
        return spec
    other = with_nodes(spec, {each.name: each.nodes for each in moved})
    # Bounds and sizes may have been edited since.
    return spec if any(check(other)) else other
