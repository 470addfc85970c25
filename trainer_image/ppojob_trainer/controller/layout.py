"""The pool of each role, from a job's resolved spec, and the layout that the cost model reads. Pure.

Called by `run`, `groups`, the monitor and the benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppojob_api.v1alpha1.pools import REWARD_MODEL, Role
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.controller.schedule import is_one_update, schedule_for
from ppojob_trainer.controller.step_time import Layout

__all__ = ["layout_of", "pools_of_copies", "pools_of_phases", "pools_of_roles"]


def pools_of_copies(role: str, pools: Sequence[str]) -> dict[str, str]:
    """Return the pool of each copy of a model, by its role: the first one has the role's name, others <role>_<pool>."""
    return {f"{role}_{pool}" if index else role: pool for index, pool in enumerate(pools)}


def pools_of_roles(spec: PPOJobSpec) -> dict[str, str]:
    """Return the pool of each role that the controller calls; the data worker is in the first pool.

    The reward function, whose workers may be in several pools, has the first of them.
    """
    placement = spec.placement
    critic = {} if placement.critic is None else {Role.CRITIC.value: placement.critic}
    return {
        "data": spec.pools[0].name,
        Role.ACTOR.value: placement.actor,
        **pools_of_copies(Role.ROLLOUT.value, placement.rollout_pools),
        **critic,
        **pools_of_copies(Role.REF.value, placement.ref_pools),
        Role.REWARD.value: placement.reward_pools[0],
        **pools_of_copies(REWARD_MODEL, placement.reward_pools if spec.reward.uses_model else ()),
        **{worker.name: worker.pool for worker in spec.workers},
    }


def pools_of_phases(spec: PPOJobSpec) -> dict[str, str]:
    """Return, by role, the pool whose GPUs its phases keep busy; roles that run only on CPU cores are left out."""
    on_cpu = {"data", "reward", *(worker.name for worker in spec.workers if not worker.uses_gpu)}
    return {role: pool for role, pool in pools_of_roles(spec).items() if role not in on_cpu}


def layout_of(spec: PPOJobSpec) -> Layout:
    """Return where the phases of a resolved spec run, and which of them run at the same time."""
    hooks = {
        point: [worker.name for worker in spec.workers for hook in worker.hooks if hook.after is point]
        for point in HookPoint
    }
    return Layout(
        pool_of=pools_of_phases(spec),
        gpus={pool.name: pool.gpus for pool in spec.pools},
        schedule=schedule_for(spec),
        hooks=hooks,
        is_one_update=is_one_update(spec),
        is_bypassed=spec.algorithm.bypasses_old_log_probs,
        shared=spec.placement.shared_pools,
        copies={Phase.REF: spec.placement.ref_pools, Phase.REWARD_MODEL: spec.placement.reward_pools},
        engines_sleep=any(map(spec.engines_sleep_in, spec.placement.rollout_pools)),
    )
