"""Starts the worker groups of a job and makes them ready: processes, checks, models, the way of the weights.

Called by `run`, once. Paths, data and the reward function are checked before the first model is loaded, in the
processes that will use them, so that a typo costs seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import Ports
from ppojob_trainer.engines.environment import base_environment
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.placement import PlacedPool
from ppojob_trainer.worker_groups.roles.actor import ActorGroup, ActorWorker
from ppojob_trainer.worker_groups.roles.critic import CriticGroup, CriticWorker
from ppojob_trainer.worker_groups.roles.data import DataGroup, DataWorker
from ppojob_trainer.worker_groups.roles.ref import RefGroup, RefWorker
from ppojob_trainer.worker_groups.roles.reward import RewardGroup, RewardWorker
from ppojob_trainer.worker_groups.roles.rollout import (
    RolloutGroup,
    RolloutWorker,
    WeightsGroup,
    rollout_environment,
    shares_gpus,
)
from ppojob_trainer.worker_groups.roles.trained import join
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["Groups", "launch", "make_ready", "pools_of_roles"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Groups:
    """The groups of a job; critic and ref where the algorithm reads them."""

    data: DataGroup
    reward: RewardGroup
    rollout: RolloutGroup
    actor: ActorGroup
    critic: CriticGroup | None
    ref: RefGroup | None
    weights: WeightsGroup

    def ports(self) -> Ports[Table]:
        """Plug the groups into the controller's ports."""
        return Ports(
            data=self.data,
            rollout=self.rollout,
            actor=self.actor,
            critic=self.critic,
            ref=self.ref,
            reward=self.reward,
            advantages=self.critic or self.actor,
            weights=self.weights,
        )

    def all(self) -> list[WorkerGroup[Any]]:
        """Return every group's processes."""
        groups = (self.data, self.reward, self.rollout, self.actor, self.critic, self.ref)
        return [group.group for group in groups if group is not None]


def pools_of_roles(spec: PPOJobSpec) -> dict[str, str]:
    """Return the pool of each role of the controller's; the data worker is in the first pool."""
    placement = spec.placement
    named = {
        "data": spec.pools[0].name,
        "actor": placement.actor,
        "rollout": placement.rollout,
        "critic": placement.critic,
        "ref": placement.ref,
        "reward": placement.reward,
    }
    return {role: pool for role, pool in named.items() if pool is not None}


def launch(spec: PPOJobSpec, pools: Mapping[str, PlacedPool], log_folder: Path) -> Groups:
    """Start all processes, without waiting for them."""
    launcher = Launcher(log_folder, float(spec.trainer.phase_timeout_seconds))
    where = {role: pools[name] for role, name in pools_of_roles(spec).items() if name in pools}

    base = base_environment(spec.device)

    def on_gpus(role: str, worker: Any, environment: Mapping[str, str] = base) -> WorkerGroup[Any]:
        pool = where[role]
        # A CPU engine takes all cores of its node, so a second one there would only share them.
        bundles = pool.one_per_node() if role == "rollout" and spec.device is Device.CPU else pool.bundles
        make = partial(worker, spec=spec)
        return launcher.start(role, make, pool, bundles, gpu_fraction=pool.gpu_fraction, environment=environment)

    reward_pool = where["reward"]
    num_workers = spec.reward.function.num_workers
    reward_bundles = [reward_pool.bundles[number % len(reward_pool.bundles)] for number in range(num_workers)]
    data_pool = where.get("data", where["actor"])
    rollout = RolloutGroup(on_gpus("rollout", RolloutWorker, rollout_environment(spec)), spec)
    actor = ActorGroup(on_gpus("actor", ActorWorker), spec)
    return Groups(
        data=DataGroup(launcher.start("data", partial(DataWorker, spec=spec), data_pool, data_pool.bundles[:1])),
        reward=RewardGroup(
            launcher.start("reward", partial(RewardWorker, spec=spec), reward_pool, reward_bundles), spec
        ),
        rollout=rollout,
        actor=actor,
        critic=CriticGroup(on_gpus("critic", CriticWorker), spec) if "critic" in where else None,
        ref=RefGroup(on_gpus("ref", RefWorker), spec) if "ref" in where else None,
        weights=WeightsGroup(actor.group, rollout, spec),
    )


async def make_ready(groups: Groups, spec: PPOJobSpec, phases: Phases) -> None:
    """Check everything, then load everything; each within the limit of a phase.

    Raises:
        PhaseTimeoutError: a check or a load took too long; names it and its role.
        WorkerGroupError: a process did not start, a check or a load failed; the cause says why.
    """
    await wait_until_up(groups.all())
    logger.info("all processes are up")
    await _check(groups, phases)
    logger.info("model paths, data and reward are in order; loading the models")
    rollout = phases.run(Phase.LOAD, "rollout", 0, groups.rollout.group.call(RolloutWorker.load))
    if spec.device is Device.CUDA and shares_gpus(spec):
        # vLLM measures the free memory while it starts, so nobody else may take some of it meanwhile.
        await rollout
        await _load_trained(groups, phases)
    else:
        await asyncio.gather(rollout, _load_trained(groups, phases))
    await phases.run(Phase.CONNECT_WEIGHTS, "rollout", 0, groups.weights.connect())
    logger.info("all models are loaded")


async def _check(groups: Groups, phases: Phases) -> None:
    checks: dict[str, Any] = {
        "data": groups.data.group.call(DataWorker.load),
        "reward": groups.reward.group.call(RewardWorker.load),
        "actor": groups.actor.group.call(ActorWorker.check),
    }
    if groups.critic is not None:
        checks["critic"] = groups.critic.group.call(CriticWorker.check)
    if groups.ref is not None:
        checks["ref"] = groups.ref.group.call(RefWorker.check)
    await asyncio.gather(*(phases.run(Phase.CHECK, role, 0, check) for role, check in checks.items()))


async def _load_trained(groups: Groups, phases: Phases) -> None:
    loads: dict[str, Any] = {"actor": _load(groups.actor.group, ActorWorker.load)}
    if groups.critic is not None:
        loads["critic"] = _load(groups.critic.group, CriticWorker.load)
    if groups.ref is not None:
        loads["ref"] = _load(groups.ref.group, RefWorker.load)
    await asyncio.gather(*(phases.run(Phase.LOAD, role, 0, load) for role, load in loads.items()))


async def _load(group: WorkerGroup[Any], load: Any) -> None:
    await join(group)
    await group.call(load)
