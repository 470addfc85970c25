"""Rules of `placement.lentToRollout`. `rules.py` puts them beside the others, each in CEL and in Python."""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.parallel_rules import ROLLOUT_POOL
from ppojob_api.v1alpha1.spec import PPOJobSpec

LENDING_RULES = [
    Rule(
        rule=(
            "!has(self.placement.lentToRollout) || self.placement.lentToRollout.all(n, "
            f"n != {ROLLOUT_POOL} && self.pools.exists(p, p.name == n))"
        ),
        message="each of placement.lentToRollout must be the name of one of spec.pools, and not the rollout's own",
        field_path=".placement.lentToRollout",
    ),
]


def _lent_pools_are_others(spec: PPOJobSpec) -> Iterator[Problem]:
    names = [pool.name for pool in spec.pools]
    own, *lent = spec.placement.rollout_pools
    for index, name in enumerate(lent):
        where = f"placement.lentToRollout[{index}]"
        if name not in names:
            yield where, name, f"there is no pool of this name: use one of {', '.join(names)}, or add the pool"
        if name == own:
            yield where, name, "this is the rollout's own pool: take it out"
        if name in lent[:index]:
            yield where, name, "this pool is named twice: keep one"


LENDING_CHECKS = (_lent_pools_are_others,)
