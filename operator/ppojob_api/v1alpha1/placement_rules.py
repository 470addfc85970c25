"""Rules of `spec.placement`: when it is required, and which pools it may name.

`rules.py` puts them beside the others, each in CEL and in Python, except that of a reward function's workers, which is
in Python only. CEL sees the placement as it is given; Python sees the one that `PPOJobSpec` fills in for a single pool.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.pools import IN_SEVERAL_POOLS, Role
from ppojob_api.v1alpha1.spec import PPOJobSpec

_PLACED = "has(self.placement)"
_ONLY_POOL = "self.pools[0].name"
ACTOR_POOL = f"({_PLACED} ? self.placement.actor : {_ONLY_POOL})"
CRITIC_POOL = f"({_PLACED} && has(self.placement.critic) ? self.placement.critic : {ACTOR_POOL})"
ROLLOUT_POOLS = f"({_PLACED} && has(self.placement.rollout) ? self.placement.rollout : [{ACTOR_POOL}])"
"""In CEL. The first of the rollout's pools is its own."""

PLACEMENT_RULES = [
    Rule(
        rule=f"{_PLACED} || size(self.pools) == 1",
        message="with several pools, placement is required: set the pool of each role",
        field_path=".placement",
    ),
    *(
        Rule(
            rule=(
                f"!{_PLACED} || !has(self.placement.{role.value}) || "
                f"self.pools.exists(p, p.name == self.placement.{role.value})"
            ),
            message=f"placement.{role.value} must be the name of one of spec.pools",
            field_path=f".placement.{role.value}",
        )
        for role in Role
        if role not in IN_SEVERAL_POOLS
    ),
    *(
        Rule(
            rule=(
                f"!{_PLACED} || !has(self.placement.{role.value}) || "
                f"self.placement.{role.value}.all(n, self.pools.exists(p, p.name == n))"
            ),
            message=f"each entry of placement.{role.value} must be the name of one of spec.pools",
            field_path=f".placement.{role.value}",
            value=f"self.placement.{role.value}.filter(n, !self.pools.exists(p, p.name == n))",
        )
        for role in IN_SEVERAL_POOLS
    ),
]

DISTINCT_POOLS_RULES = [
    Rule(
        # The list has an order, so it is not a set of the API server.
        rule=f"!has(self.{role.value}) || self.{role.value}.all(n, self.{role.value}.exists_one(m, m == n))",
        message="a pool is listed twice: remove one",
        field_path=f".{role.value}",
    )
    for role in IN_SEVERAL_POOLS
]
"""Of `placement` alone."""


def _several_pools_need_a_placement(spec: PPOJobSpec) -> Iterator[Problem]:
    names = [pool.name for pool in spec.pools]
    if len(names) > 1 and "placement" not in spec.model_fields_set:
        yield (
            "placement",
            None,
            f"with several pools ({', '.join(names)}) it is required: set the pool of each role, at least "
            f"{{actor: {names[0]}}}",
        )


def _placement_names_pools(spec: PPOJobSpec) -> Iterator[Problem]:
    names = [pool.name for pool in spec.pools]
    for role in Role:
        for index, name in enumerate(spec.placement.pools_of(role)):
            if name not in names:
                where = f"placement.{role.value}" + (f"[{index}]" if role in IN_SEVERAL_POOLS else "")
                yield where, name, f"there is no pool of this name: use one of {', '.join(names)}, or add the pool"


def _pools_of_a_role_are_distinct(spec: PPOJobSpec) -> Iterator[Problem]:
    for role in IN_SEVERAL_POOLS:
        names = spec.placement.pools_of(role)
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"placement.{role.value}[{index}]", name, "this pool is listed twice: remove one"


def _each_pool_of_a_reward_function_has_a_worker(spec: PPOJobSpec) -> Iterator[Problem]:
    function, pools = spec.reward.function, spec.placement.reward_pools
    number = len(set(pools))
    if not spec.reward.uses_model and function is not None and number > function.num_workers:
        remedy = (
            f"reward.function.numWorkers is {function.num_workers}, so not each of the {number} pools would have a "
            f"worker: list fewer pools, or create the job with numWorkers: {number}"
        )
        yield "placement.reward", list(pools), remedy


PLACEMENT_CHECKS = (
    _several_pools_need_a_placement,
    _placement_names_pools,
    _pools_of_a_role_are_distinct,
    _each_pool_of_a_reward_function_has_a_worker,
)
