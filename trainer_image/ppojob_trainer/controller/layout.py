"""The pool of each role, from a job's resolved spec, and the layout that the cost model reads. Pure.

Called by `run`, `groups`, the monitor and the benchmark.
"""

from __future__ import annotations

from ppojob_api.v1alpha1.pools import Placement
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.generation import OWN
from ppojob_trainer.controller.schedule import is_one_update, schedule_for
from ppojob_trainer.controller.step_time import Layout

__all__ = ["layout_of", "pools_of_phases", "pools_of_roles", "ref_role", "shared_role"]

REF = "ref"


def shared_role(pool: str) -> str:
    """Return the role of the engines in a pool that is shared with the rollout."""
    return f"{OWN}_{pool}"


def ref_role(placement: Placement, pool: str) -> str:
    """Return the role of the reference in one of its pools."""
    return REF if pool == placement.ref_pools[0] else f"{REF}_{pool}"


def pools_of_roles(spec: PPOJobSpec) -> dict[str, str]:
    """Return the pool of each role that the controller calls; the data worker is in the first pool."""
    placement = spec.placement
    named = {
        "data": spec.pools[0].name,
        "actor": placement.actor,
        "rollout": placement.rollout_pools[0],
        "critic": placement.critic,
        **{ref_role(placement, pool): pool for pool in placement.ref_pools},
        "reward": placement.reward,
        "reward_model": placement.reward if spec.reward.uses_model else None,
        **{worker.name: worker.pool for worker in spec.workers},
        **{shared_role(pool): pool for pool in placement.shared_pools},
    }
    return {role: pool for role, pool in named.items() if pool is not None}


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
        ref_pools=spec.placement.ref_pools,
        engines_sleep=any(map(spec.engines_sleep_in, spec.placement.rollout_pools)),
    )
