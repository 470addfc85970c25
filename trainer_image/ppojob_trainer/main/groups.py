"""Starts the worker groups of a job and prepares them: processes, checks, models, connections for the weights.

`run` calls it once. Paths, data and the reward function are checked before FSDP loads a model, in the processes that
will use them, so that a typo costs seconds. The rollout engine takes longest to load; it loads its libraries meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ppojob_api.v1alpha1.engine import Engine
from ppojob_api.v1alpha1.pools import REWARD_MODEL, Role, base_role
from ppojob_api.v1alpha1.progress import LiveSettings
from ppojob_api.v1alpha1.resolve import reward_workers
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.generation import OWN
from ppojob_trainer.controller.layout import pools_of_copies, pools_of_roles
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import Ports
from ppojob_trainer.engines.environment import pool_environment
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.main.host_memory import saves_in_background
from ppojob_trainer.main.memory_fit import check_memory, stay_gathered
from ppojob_trainer.worker_groups.connections import Connections, of_ranks, of_weights
from ppojob_trainer.worker_groups.custom import HookCall, UserWorkers
from ppojob_trainer.worker_groups.elastic_nodes import NodesOfPool
from ppojob_trainer.worker_groups.errors import WorkerGroupError
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.placement import Bundle, PlacedPool
from ppojob_trainer.worker_groups.roles.actor import ActorGroup, ActorWorker
from ppojob_trainer.worker_groups.roles.critic import CriticGroup, CriticWorker
from ppojob_trainer.worker_groups.roles.data import DataGroup, DataWorker
from ppojob_trainer.worker_groups.roles.elastic_rollout import ElasticRolloutGroup
from ppojob_trainer.worker_groups.roles.gpu_holder import GpuHolder
from ppojob_trainer.worker_groups.roles.ref import AdaptersOff, RefGroup, RefWorker
from ppojob_trainer.worker_groups.roles.reward import FunctionScores, RewardGroup, RewardWorker
from ppojob_trainer.worker_groups.roles.reward_model import ModelScores, RewardModelWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker, rollout_environment
from ppojob_trainer.worker_groups.roles.rollout_group import Replicas, RolloutGroup
from ppojob_trainer.worker_groups.roles.trained import EngineWorker, ModelSize, TrainedWorker, join
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["Groups", "continuing_roles", "launch", "make_ready"]

logger = logging.getLogger(__name__)

_HOLDER = "_gpu_holder"


@dataclass(frozen=True)
class Groups:
    """The groups of a job: the roles that the algorithm reads, and the user-defined workers.

    shared: the engines in pools that are shared with the rollout, by role. refs: the reference in each of its pools, by
    role; empty if the algorithm reads none.
    """

    data: DataGroup
    reward: RewardGroup
    rollout: RolloutGroup
    shared: Mapping[str, RolloutGroup]
    actor: ActorGroup
    critic: CriticGroup | None
    refs: Mapping[str, RefGroup | AdaptersOff]
    weights: WeightsGroup
    custom: tuple[WorkerGroup[Any], ...]
    hooks: tuple[HookCall, ...]

    def ports(self) -> Ports[Table]:
        """Plug the groups into the controller's ports."""
        return Ports(
            data=self.data,
            rollout=self.rollout,
            actor=self.actor,
            critic=self.critic,
            refs=self.refs,
            reward=self.reward,
            advantages=self.critic or self.actor,
            weights=self.weights,
            hooks=self.hooks,
            shared=self.shared,
        )

    @property
    def own_refs(self) -> dict[str, RefGroup]:
        """The reference in each of its pools, by role, if it has separate processes."""
        return {role: ref for role, ref in self.refs.items() if isinstance(ref, RefGroup)}

    def all(self) -> list[WorkerGroup[Any]]:
        """Return every group's processes."""
        return [*self.others(), *self.engines()]

    def others(self) -> list[WorkerGroup[Any]]:
        """Return the processes of all groups but the engines."""
        scores = (self.reward.function, *self.reward.models.values())
        groups = (self.data, *scores, self.actor, self.critic, *self.own_refs.values())
        return [*(group.group for group in groups if group is not None), *self.custom]

    def engines(self) -> list[WorkerGroup[Any]]:
        """Return the processes of all engines."""
        return [group for rollout in self.rollouts for group in rollout.groups]

    @property
    def lost(self) -> list[WorkerGroupError]:
        """Return why engines were lost."""
        return [failure for rollout in self.rollouts for failure in rollout.lost.values()]

    @property
    def rollouts(self) -> list[RolloutGroup]:
        """The engines of each pool; the rollout's own pool is first."""
        return [self.rollout, *self.shared.values()]

    @property
    def elastic(self) -> list[ElasticRolloutGroup]:
        """The engines of each elastic pool."""
        return [rollout for rollout in self.rollouts if isinstance(rollout, ElasticRolloutGroup)]


def continuing_roles(spec: PPOJobSpec) -> dict[str, frozenset[str]]:
    """Return by pool the roles whose processes can continue in the next attempt, if no process of the pool was lost.

    User-defined workers are started again, because their state is not in a checkpoint. A pool with a user's engine is
    not kept, because the engine need not be able to restore a second time. Nor are elastic pools.
    """
    of_pool: dict[str, set[str]] = {}
    placed = pools_of_roles(spec)
    if spec.pool(placed["data"]).elastic is not None:
        placed["data"] = placed["actor"]
    # The reward function may have workers in several pools.
    without = {Role.REWARD.value, *(worker.name for worker in spec.workers)}
    if spec.model.reference_is_actor:
        without.add(Role.REF)
    own = {role for role, one in {"actor": spec.actor, "critic": spec.critic}.items() if one.engine is not Engine.FSDP}
    if "actor" in own:
        own |= {role for role in placed if base_role(role) == Role.REF}
    for role, pool in placed.items():
        if role in without or spec.pool(pool).elastic is not None:
            continue
        of_pool.setdefault(pool, set()).add(role)
        if (role == OWN or role.startswith(f"{OWN}_")) and spec.rollout.gpus_per_replica > 1:
            of_pool[pool].add(f"{role}{_HOLDER}")
    for pool in reward_workers(spec):
        of_pool.setdefault(pool, set()).add(Role.REWARD)
    return {pool: frozenset(roles) for pool, roles in of_pool.items() if not roles & own}


def launch(spec: PPOJobSpec, pools: Mapping[str, PlacedPool], launcher: Launcher) -> Groups:
    """Start all processes, without waiting for them.

    Raises:
        WorkerImportError: a user-defined class cannot be imported; no process is started.
    """
    users = [UserWorkers.of(worker, index) for index, worker in enumerate(spec.workers)]
    where = {role: pools[name] for role, name in pools_of_roles(spec).items() if name in pools}

    def on_gpus(role: str, worker: Any) -> WorkerGroup[Any]:
        pool = where[role]
        start = partial(launcher.start, role, partial(worker, spec=spec), pool, pool.bundles)
        return start(gpu_fraction=pool.gpu_fraction, environment=pool_environment(spec, pool.name))

    data_pool = where.get("data", where["actor"])
    data = DataGroup(launcher.start("data", partial(DataWorker, spec=spec), data_pool, data_pool.bundles[:1]))
    generating = spec.placement.rollout_pools
    rollouts = {
        role: _rollout(launcher, spec, role, pools[pool])
        if pool in pools
        else _elastic_rollout(launcher, spec, role, pool, data)
        for role, pool in pools_of_copies(OWN, generating).items()
    }
    rollout, shared = rollouts[OWN], {role: one for role, one in rollouts.items() if role != OWN}
    actor = ActorGroup(on_gpus("actor", ActorWorker), spec)
    refs: dict[str, RefGroup | AdaptersOff] = {
        role: AdaptersOff(actor) if spec.model.reference_is_actor else RefGroup(on_gpus(role, RefWorker), spec)
        for role in where
        if base_role(role) == Role.REF
    }
    custom = tuple(
        user.start(launcher, where[user.spec.name], pool_environment(spec, user.spec.pool)) for user in users
    )
    critic = CriticGroup(on_gpus("critic", CriticWorker), spec) if "critic" in where else None
    judges = {role: ModelScores(on_gpus(role, RewardModelWorker)) for role in where if base_role(role) == REWARD_MODEL}
    models = {"actor": actor, "critic": critic, **refs, **judges}
    with_engines = [model for role, model in models.items() if model is not None and where[role].name in generating]
    neighbours = [model.group for model in with_engines if not isinstance(model, AdaptersOff)]
    return Groups(
        data=data,
        reward=RewardGroup(_reward_function(launcher, spec, pools), judges, spec, data.write_samples),
        rollout=rollout,
        shared=shared,
        actor=actor,
        critic=critic,
        refs=refs,
        weights=WeightsGroup(actor.group, [rollout, *shared.values()], spec, neighbours),
        custom=custom,
        hooks=tuple(hook for user, group in zip(users, custom, strict=True) for hook in user.hooks(group)),
    )


def _rollout(launcher: Launcher, spec: PPOJobSpec, role: str, pool: PlacedPool) -> RolloutGroup:
    replicas = pool.in_replicas(spec.rollout.gpus_per_replica, is_on_cpu=spec.device is Device.CPU)
    return RolloutGroup(_replicas(launcher, spec, role, pool, replicas), spec, pool.name)


def _replicas(
    launcher: Launcher,
    spec: PPOJobSpec,
    role: str,
    pool: PlacedPool,
    replicas: Sequence[Sequence[Bundle]],
    first_rank: int = 0,
) -> Replicas:
    """Start the processes of replicas; of each of them the first bundle has the engine's."""
    environment = rollout_environment(spec, pool.name)
    start = partial(launcher.start, pool=pool, gpu_fraction=pool.gpu_fraction, environment=environment)
    make, hold = partial(RolloutWorker, spec=spec, pool=pool.name), partial(GpuHolder, spec=spec, pool=pool.name)
    group = start(role, make, bundles=[first for first, *_ in replicas], first_rank=first_rank)
    others = [bundle for _, *rest in replicas for bundle in rest]
    first_holder = first_rank * (len(replicas[0]) - 1)
    holders = start(f"{role}{_HOLDER}", hold, bundles=others, first_rank=first_holder) if others else None
    return Replicas(group, holders, len({bundle.node_id for bundle in replicas[0]}))


def _elastic_rollout(launcher: Launcher, spec: PPOJobSpec, role: str, pool: str, data: DataGroup) -> RolloutGroup:
    def start(place: PlacedPool, rank: int) -> Replicas:
        return _replicas(launcher, spec, role, place, [place.bundles], rank)

    none = launcher.none_of(role, RolloutWorker)
    return ElasticRolloutGroup(spec, pool, NodesOfPool(spec, pool), start, none, data.keep)


def _reward_function(launcher: Launcher, spec: PPOJobSpec, pools: Mapping[str, PlacedPool]) -> FunctionScores | None:
    if spec.reward.function is None:
        return None
    group = launcher.none_of("reward", RewardWorker)
    for name, number in reward_workers(spec).items():
        bundles = itertools.islice(itertools.cycle(pools[name].bundles), number)
        make = partial(RewardWorker, spec=spec)
        group = group.extended_by(launcher.start("reward", make, pools[name], list(bundles), first_rank=len(group)))
    return FunctionScores(group, spec)


@dataclass(frozen=True)
class Ready:
    """Facts about a job that are known once everything is loaded.

    connections: the transports among the ranks of each role, and between the actor and the rollout.
    saves_in_background: whether steps continue while a checkpoint is written.
    steps_per_epoch: whole batches in an epoch of the training prompts.
    """

    connections: list[Connections]
    saves_in_background: bool
    steps_per_epoch: int


async def make_ready(groups: Groups, spec: PPOJobSpec, phases: Phases) -> Ready:
    """Check everything, then load everything. Each check and each load has the time limit of a phase.

    Raises:
        PhaseTimeoutError: a check or a load took too long; names it and its role.
        WorkerGroupError: a process did not start, or a check or a load failed; the cause says why.
    """
    # vLLM takes longest by far, mostly to import its libraries. It can start as soon as its own processes are up.
    is_free = asyncio.Event()
    rollout = asyncio.create_task(_load_rollouts(groups, phases, is_free), name="load rollout")
    try:
        # Except the rollout's: they answer no other call while they load.
        await wait_until_up(groups.others())
        logger.info("all processes are up")
        # A check names a wrong path or wrong data before an engine fails because of it.
        steps_per_epoch = await _check(groups, phases)
        total_steps = LiveSettings.of(spec.trainer, spec.checkpoint).steps(steps_per_epoch)
        sizes = await _sizes(groups, spec, phases) if spec.device is Device.CUDA else {}
        in_background, of_hosts = saves_in_background(spec, sizes)
        for warning in [*check_memory(spec, sizes), *of_hosts]:
            logger.warning("%s", warning)
        gathered = stay_gathered(spec, sizes)
        if whole := [role for role, stays in gathered.items() if stays]:
            logger.info("whole on each rank through an optimizer step: %s", ", ".join(whole))
        logger.info("model paths, data and reward are valid; loading the models")
        joined, _ = await asyncio.gather(_load_models(groups, spec, phases, is_free, gathered, total_steps), rollout)
    finally:
        rollout.cancel()
        rollout.add_done_callback(lambda done: done.cancelled() or done.exception())
    # One hook of each group.
    joining = {hook.worker: hook for hook in groups.hooks if hook.joins}
    await asyncio.gather(*(phases.run(Phase.LOAD, worker, 0, hook.join()) for worker, hook in joining.items()))
    if in_background and 0 < spec.checkpoint.every_steps < total_steps:
        trained = (groups.actor, groups.critic)
        await asyncio.gather(*(role.group.call(EngineWorker.prepare_saves) for role in trained if role is not None))
    sent = await phases.run(Phase.CONNECT_WEIGHTS, OWN, 0, groups.weights.connect())
    logger.info("all models are loaded")
    pool_of = pools_of_roles(spec)
    ranks = (of_ranks(role, pool_of[role], each) for role, each in joined.items())
    weights = of_weights(pool_of["actor"], spec.placement.rollout_pools, sent)
    return Ready([*(found for found in ranks if found), weights], in_background, steps_per_epoch)


async def _load_rollouts(groups: Groups, phases: Phases, is_free: asyncio.Event) -> None:
    """Start the engines. They wait until the GPUs that they share with other roles are free (`is_free`)."""
    loading = {OWN: groups.rollout, **groups.shared}
    await asyncio.gather(*(_load_rollout(role, rollout, phases, is_free) for role, rollout in loading.items()))


async def _load_rollout(role: str, rollout: RolloutGroup, phases: Phases, is_free: asyncio.Event) -> None:
    await wait_until_up(rollout.groups)
    await rollout.begin_load()
    await is_free.wait()
    await phases.run(Phase.LOAD, role, 0, rollout.load())


async def _check(groups: Groups, phases: Phases) -> int:
    """Check paths, data and reward; return the steps of an epoch."""
    checks: dict[str, Any] = {"actor": groups.actor.group.call(ActorWorker.check)}
    checks |= {role: model.group.call(RewardModelWorker.check) for role, model in groups.reward.models.items()}
    if groups.critic is not None:
        checks["critic"] = groups.critic.group.call(CriticWorker.check)
    checks |= {role: ref.group.call(RefWorker.check) for role, ref in groups.own_refs.items()}
    data = asyncio.create_task(_check_data_and_reward(groups, phases))
    await asyncio.gather(data, *(phases.run(Phase.CHECK, role, 0, check) for role, check in checks.items()))
    return data.result()


async def _check_data_and_reward(groups: Groups, phases: Phases) -> int:
    """Open the data, then load the reward function, which checks the data sources; return the steps of an epoch."""
    data = phases.run(Phase.CHECK, "data", 0, groups.data.group.call(DataWorker.load))
    if groups.reward.function is None:
        return (await data).steps_per_epoch
    reward = groups.reward.function.group
    tokenizer = phases.run(Phase.CHECK, "reward", 0, reward.call(RewardWorker.load_tokenizer))
    loaded, _ = await asyncio.gather(data, tokenizer)
    await phases.run(Phase.CHECK, "reward", 0, reward.call(RewardWorker.load, loaded.sources))
    return loaded.steps_per_epoch


async def _sizes(groups: Groups, spec: PPOJobSpec, phases: Phases) -> dict[str, ModelSize]:
    """Return the model size of each role that uses GPUs, by role. The memory of a user's engine is not known."""
    loading = {
        "actor": (groups.actor, spec.actor.engine),
        "critic": (groups.critic, spec.critic.engine),
        **{role: (ref, spec.actor.engine) for role, ref in groups.own_refs.items()},
        **{role: (model, Engine.FSDP) for role, model in groups.reward.models.items()},
    }
    sized = {
        role: one.group.call(TrainedWorker.size)
        for role, (one, engine) in loading.items()
        if one is not None and engine is Engine.FSDP
    }
    found = await asyncio.gather(*(phases.run(Phase.CHECK, role, 0, size) for role, size in sized.items()))
    return dict(zip(sized, found, strict=True))


async def _load_models(
    groups: Groups,
    spec: PPOJobSpec,
    phases: Phases,
    is_free: asyncio.Event,
    gathered: Mapping[str, bool],
    total_steps: int,
) -> dict[str, list[Transports]]:
    """Load all models except the rollout's. Return the transports among the ranks of each role.

    Args:
        gathered: by role, whether its parameters stay gathered through an optimizer step.
        is_free: set when the roles that share a GPU with an engine are loaded. vLLM measures the free memory while it
            starts, so no other process may allocate on that GPU meanwhile.
        total_steps: of the run, for the schedules of the learning rates.
    """
    loads: dict[str, Any] = {"actor": (groups.actor.group, ActorWorker.load, gathered["actor"], total_steps)}
    if groups.critic is not None:
        loads["critic"] = (groups.critic.group, CriticWorker.load, gathered["critic"], total_steps)
    loads |= {role: (ref.group, RefWorker.load, gathered[role], total_steps) for role, ref in groups.own_refs.items()}
    loads |= {role: (model.group, RewardModelWorker.load) for role, model in groups.reward.models.items()}
    loading = {
        role: asyncio.create_task(phases.run(Phase.LOAD, role, 0, _load(*load)), name=f"load {role}")
        for role, load in loads.items()
    }
    if spec.device is Device.CUDA:
        pool_of, with_engines = pools_of_roles(spec), spec.placement.rollout_pools
        await asyncio.gather(*(task for role, task in loading.items() if pool_of[role] in with_engines))
    is_free.set()
    await asyncio.gather(*loading.values())
    return {role: task.result() for role, task in loading.items()}


async def _load(group: WorkerGroup[Any], load: Any, *arguments: int) -> list[Transports]:
    joined = await join(group)
    await group.call(load, *arguments)
    return joined
