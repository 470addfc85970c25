"""Rules of elastic pools: they only generate, their bounds fit, and some pool generates from the start.

`rules.py` puts them beside the others, each in CEL and in Python. CEL sees the placement as it is given.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.placement_rules import ACTOR_POOL, ROLLOUT_POOLS
from ppojob_api.v1alpha1.pools import IN_SEVERAL_POOLS, Pool, Role
from ppojob_api.v1alpha1.spec import PPOJobSpec

_OTHER_ROLES = (Role.CRITIC, Role.REF, Role.REWARD)


def _is_elsewhere(placed: str, role: Role) -> str:
    """Return in CEL whether a role that is placed there is not in pool p."""
    return f"!(p.name in {placed})" if role in IN_SEVERAL_POOLS else f"{placed} != p.name"


ELASTIC_POOL_RULES = [
    Rule(
        rule="!has(self.elastic) || self.elastic.minNodes <= self.elastic.maxNodes",
        message="elastic.minNodes must not be above elastic.maxNodes",
        field_path=".elastic",
    ),
    Rule(
        rule=("!has(self.elastic) || !has(self.nodes) || self.nodes == 1 || self.nodes == self.elastic.maxNodes"),
        message="an elastic pool has between elastic.minNodes and elastic.maxNodes pods: remove nodes",
        field_path=".nodes",
    ),
    Rule(
        rule="!has(self.elastic) || (!has(self.minNodes) && !has(self.maxNodes))",
        message="minNodes and maxNodes are for autoBalance, which resizes no elastic pool: put them into elastic",
        field_path=".elastic",
    ),
]
"""Of a pool."""

ELASTIC_RULES = [
    Rule(
        rule=(
            "self.pools.all(p, !has(p.elastic) || ("
            f"p.name in {ROLLOUT_POOLS} && p.name != {ACTOR_POOL}"
            + "".join(
                f" && (!has(self.placement) || !has(self.placement.{role.value}) || "
                f"{_is_elsewhere(f'self.placement.{role.value}', role)})"
                for role in _OTHER_ROLES
            )
            + " && (!has(self.workers) || self.workers.all(w, w.pool != p.name))))"
        ),
        message=(
            "an elastic pool only generates: name it in placement.rollout and in no other role or worker, or remove "
            "elastic"
        ),
        field_path=".pools",
        value="self.pools.filter(p, has(p.elastic)).map(p, p.name)",
    ),
    Rule(
        rule=(
            "self.pools.all(p, !has(p.elastic)) || "
            f"self.pools.exists(p, p.name in {ROLLOUT_POOLS} && (!has(p.elastic) || p.elastic.minNodes > 0))"
        ),
        message="no pool would generate at the start: set elastic.minNodes of a pool of placement.rollout to 1 or more",
        field_path=".pools",
        value="self.pools.filter(p, has(p.elastic)).map(p, p.name)",
    ),
    Rule(
        rule="!self.autoBalance.enabled || self.pools.all(p, !has(p.elastic))",
        message="autoBalance measures pools of a fixed size: remove it, or elastic of all pools",
        field_path=".autoBalance.enabled",
    ),
]
"""Of the whole spec."""


def _elastic(spec: PPOJobSpec) -> Iterator[tuple[str, Pool]]:
    for index, pool in enumerate(spec.pools):
        if pool.elastic is not None:
            yield f"pools[{index}]", pool


def _bounds_of_elastic_pools_fit(spec: PPOJobSpec) -> Iterator[Problem]:
    for where, pool in _elastic(spec):
        elastic = pool.elastic
        assert elastic is not None
        if elastic.min_nodes > elastic.max_nodes:
            remedy = f"is above maxNodes, which is {elastic.max_nodes}: lower it, or raise maxNodes"
            yield f"{where}.elastic.minNodes", elastic.min_nodes, remedy
        elif pool.nodes not in (1, elastic.max_nodes):
            bounds = f"between {elastic.min_nodes} and {elastic.max_nodes} pods (elastic)"
            yield f"{where}.nodes", pool.nodes, f"the pool has {bounds}: remove nodes"
        if pool.min_nodes is not None or pool.max_nodes is not None:
            remedy = "minNodes and maxNodes are for autoBalance, which resizes no elastic pool: put them into elastic"
            yield f"{where}.elastic", None, remedy


def _elastic_pools_only_generate(spec: PPOJobSpec) -> Iterator[Problem]:
    for where, pool in _elastic(spec):
        others = [
            f"placement.{role.value}"
            for role in Role
            if role is not Role.ROLLOUT and pool.name in spec.placement.pools_of(role)
        ]
        others += [f"worker {worker.name}" for worker in spec.workers if worker.pool == pool.name]
        if others:
            remedy = f"{' and '.join(others)} must stay in the pool: use another pool there, or remove elastic"
            yield f"{where}.elastic", pool.name, f"an elastic pool only generates, and {remedy}"
        elif pool.name not in spec.placement.rollout_pools:
            remedy = "an elastic pool generates: name it in placement.rollout, or remove elastic"
            yield f"{where}.elastic", pool.name, remedy


def _some_pool_generates_at_the_start(spec: PPOJobSpec) -> Iterator[Problem]:
    generating = [pool for pool in spec.pools if pool.name in spec.placement.rollout_pools]
    if generating and all(pool.elastic is not None and pool.elastic.min_nodes == 0 for pool in generating):
        where = f"pools[{spec.pools.index(generating[0])}].elastic.minNodes"
        yield where, 0, "no pool would generate at the start: set it to 1 or more, or add a pool to placement.rollout"


def _auto_balance_has_fixed_pools(spec: PPOJobSpec) -> Iterator[Problem]:
    names = ", ".join(pool.name for _, pool in _elastic(spec))
    if names and spec.auto_balance.enabled:
        remedy = f"it measures pools of a fixed size, and {names} is elastic: remove it, or elastic"
        yield "autoBalance.enabled", True, remedy


ELASTIC_CHECKS = (
    _bounds_of_elastic_pools_fit,
    _elastic_pools_only_generate,
    _some_pool_generates_at_the_start,
    _auto_balance_has_fixed_pools,
)
