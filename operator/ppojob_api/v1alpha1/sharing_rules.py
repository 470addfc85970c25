"""Rules of `placement.rollout`, the pools that generate. `rules.py` puts them beside the others, in CEL and Python."""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.spec import PPOJobSpec

ROLLOUT_POOLS = "(has(self.placement.rollout) ? self.placement.rollout : [self.placement.actor])"
"""In CEL, the first one is the rollout's own."""

SHARING_RULES = [
    Rule(
        rule="!has(self.placement.rollout) || self.placement.rollout.all(n, self.pools.exists(p, p.name == n))",
        message="each of placement.rollout must be the name of one of spec.pools",
        field_path=".placement.rollout",
    ),
]

PLACEMENT_RULES = [
    # The list has an order, so it is no set of the API server.
    Rule(
        rule="!has(self.rollout) || self.rollout.all(n, self.rollout.exists_one(m, m == n))",
        message="a pool is named twice: keep one",
        field_path=".rollout",
    ),
]
"""Of `placement` alone."""


def _pools_that_generate_are_distinct(spec: PPOJobSpec) -> Iterator[Problem]:
    names = spec.placement.rollout or []
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"placement.rollout[{index}]", name, "this pool is named twice: keep one"


SHARING_CHECKS = (_pools_that_generate_are_distinct,)
