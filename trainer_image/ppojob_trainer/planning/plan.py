"""A job's plan: memory on each GPU and host, and what to change in a pool that is too small. Called by `cli`.

The sums over a pool, whether a model stays gathered, and the trainer's own refusals are those of `main.memory_fit` and
`main.host_memory`; only the activations are measured here, on fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.engines.train.fsdp.export import SHARD_BYTES
from ppojob_trainer.engines.train.model_fit import check_quantization
from ppojob_trainer.main.host_memory import OF_A_PROCESS, host_needs, saves_in_background
from ppojob_trainer.main.memory_fit import Need, check_memory, pool_memory, stay_gathered
from ppojob_trainer.planning.configs import read_shape
from ppojob_trainer.planning.engine import plan_engine
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.pool import PoolPlan, RolePlan
from ppojob_trainer.planning.remedies import remedies
from ppojob_trainer.planning.role_memory import measure
from ppojob_trainer.planning.roles import PlannedRole, Shapes, planned_roles, work_of
from ppojob_trainer.planning.work import Measured, Work
from ppojob_trainer.worker_groups.roles.trained import ModelSize, size_of

__all__ = ["HostPlan", "Plan", "Runner", "plan_job"]

Runner = Callable[[Work], Measured]

_BFLOAT16 = 2
_SAVED_FILE = 2**30
"""Bytes of the file that a rank writes at a time while it saves a checkpoint."""


@dataclass(frozen=True)
class HostPlan:
    """Memory of one pod of a pool, in bytes: after loading, and while it saves and exports; limit: the pod's.

    With background saves, the memory for their copies of the GPUs' tensors is part of each.
    """

    pool: str
    load: float
    save: float
    export: float
    limit: float

    @property
    def fits(self) -> bool:
        """Whether the pod holds the most of them."""
        return max(self.load, self.save, self.export) <= self.limit


@dataclass(frozen=True)
class Plan:
    """The plan of a job. notes: what the trainer would say about memory when it starts."""

    spec: PPOJobSpec
    pools: Sequence[PoolPlan]
    hosts: Sequence[HostPlan]
    notes: Sequence[str]

    @property
    def fits(self) -> bool:
        """Whether all pools and hosts fit."""
        return all(pool.fits for pool in self.pools) and all(host.fits for host in self.hosts)

    @property
    def is_close(self) -> bool:
        """Whether all fit, but a pool not with the plan's known error."""
        return self.fits and any(pool.is_close for pool in self.pools)

    @property
    def verdict(self) -> str:
        """The answer in a word or two."""
        return "close" if self.is_close else "fits" if self.fits else "does not fit"

    @property
    def roles(self) -> dict[str, RolePlan]:
        """The roles of all pools."""
        return {found.role.name: found for pool in self.pools for found in pool.roles}


def plan_job(
    spec: PPOJobSpec, gpus: Mapping[str, Gpu], *, shapes: Shapes = read_shape, runner: Runner = measure
) -> Plan:
    """Plan a job.

    Args:
        gpus: of each pool.
        shapes: reads the models' configurations.
        runner: runs a role's passes.

    Raises:
        ShapeNotFoundError: see `configs`.
        ModelMismatchError, ModelUnsupportedError: a model cannot be divided, or has an unsupported part.
        ValueError: the job runs on CPUs, its GPUs lack the engines' format, or its sizes do not fit together.
    """
    spec = resolve(spec)
    if spec.device is not Device.CUDA:
        raise ValueError("spec.device: CPU: a plan is of GPUs: add --set spec.device=CUDA")
    roles = planned_roles(spec, shapes)
    _check_quantization(spec, roles, gpus)
    sizes = {name: _size(spec, role, gpus[role.pool]) for name, role in roles.items()}
    gathered = stay_gathered(spec, sizes)
    planned = {
        name: _planned(role, runner(work_of(spec, role, stays_gathered=gathered.get(name, False))), gathered)
        for name, role in roles.items()
    }
    in_use = [pool.name for pool in spec.pools if _is_used(spec, pool.name, planned)]
    pools = [_pool(spec, name, gpus[name], planned) for name in in_use]
    return Plan(spec, pools, _hosts(spec, sizes), _notes(spec, sizes))


def _size(spec: PPOJobSpec, role: PlannedRole, gpu: Gpu) -> ModelSize:
    pool = spec.pool(role.pool)
    limit = int(parse_quantity(pool.resources_per_gpu.memory)) * pool.gpus_per_node
    size = size_of(role.config, role.source, int(gpu.memory), role.divided_like)
    return replace(size, host=role.pool, host_bytes=limit)


def _planned(role: PlannedRole, measured: Measured, gathered: Mapping[str, bool]) -> RolePlan:
    moments = measured.optimizer
    weights = 0 if role.offloads_parameters else measured.weights
    resident = weights + (0 if role.offloads_moments else moments)
    # Between updates, a pass runs beside the moments, unless they are on the host.
    peak = max(measured.update, measured.forward + (0 if role.offloads_moments else moments))
    only_moments = role.offloads_moments and not role.offloads_parameters
    need = Need(
        role.name,
        measured.weights,
        measured.gradients,
        moments,
        resident,
        activations=peak - measured.weights - measured.gradients - moments,
        is_returned=role.offloads_parameters or role.offloads_moments,
        after_passes=measured.forward - measured.weights if only_moments else 0,
        push=measured.push + (0 if role.offloads_moments else moments) if measured.push else 0,
    )
    return RolePlan(role, measured, need, peak, gathered.get(role.name, False))


def _check_quantization(spec: PPOJobSpec, roles: Mapping[str, PlannedRole], gpus: Mapping[str, Gpu]) -> None:
    quantization = spec.rollout.quantization
    check_quantization(roles["actor"].config, quantization)
    for pool in spec.placement.rollout_pools:
        if quantization is not None and not gpus[pool].has_fp8:
            raise ValueError(
                f"spec.rollout.quantization: {quantization}: the {gpus[pool].name} of pool {pool} has no FP8 units: "
                f"remove it, or plan with --gpu {pool}=H100"
            )


def _is_used(spec: PPOJobSpec, pool: str, planned: Mapping[str, RolePlan]) -> bool:
    return pool in spec.placement.rollout_pools or any(found.role.pool == pool for found in planned.values())


def _pool(spec: PPOJobSpec, name: str, gpu: Gpu, planned: Mapping[str, RolePlan]) -> PoolPlan:
    roles = [found for found in planned.values() if found.role.pool == name]
    engine, needed, receiving = None, 0.0, 0.0
    if name in spec.placement.rollout_pools:
        actor = planned["actor"]
        engine = plan_engine(spec, name, actor.role.config, actor.measured.num_sent, gpu.memory)
        needed, receiving = engine.weights, engine.receiving
    peaks = [(found.need, found.peak) for found in roles]
    memory = pool_memory(spec, name, peaks, gpu.memory, needed, receiving)
    found = PoolPlan(name, gpu, roles, engine, memory)
    is_safe = found.fits and not found.is_close
    return found if is_safe else replace(found, changes=remedies(spec, found, gpu))


def _hosts(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> list[HostPlan]:
    # The last checkpoint of a run is not written in the background: nothing changes the models after it.
    is_async = spec.checkpoint.every_steps > 0 and _is_in_background(spec, sizes)
    found = []
    for pool, needs in host_needs(spec, sizes).items():
        load = sum(need.offloaded + OF_A_PROCESS * need.num_processes for need in needs)
        staged = sum(need.staged for need in needs) if is_async else 0
        trained = [need for need in needs if need.role in ("actor", "critic")]
        save = load + (staged if is_async else sum(_SAVED_FILE * need.num_processes for need in trained))
        # Allocated when the models are loaded, and kept.
        load += staged
        of_actor = [need.num_processes for need in needs if need.role == "actor"]
        export = load + sum(_exported(spec, sizes["actor"].num_parameters, num_local) for num_local in of_actor)
        found.append(HostPlan(pool, load, save, export, min(sizes[need.role].host_bytes for need in needs)))
    return found


def _exported(spec: PPOJobSpec, num_parameters: int, num_local: int) -> float:
    """Return the bytes of the files that the `num_local` actor ranks of a host hold at a time while they export.

    A rank holds one file. Where there are fewer files than ranks, the writers are spread over the hosts.
    """
    total = _BFLOAT16 * num_parameters
    num_files = math.ceil(total / SHARD_BYTES)
    num_ranks = spec.pool(spec.placement.actor).gpus
    return min(num_local, math.ceil(num_files * num_local / num_ranks)) * min(SHARD_BYTES, total)


def _is_in_background(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> bool:
    """Return whether checkpoints are written in the background; not if the hosts are too small."""
    try:
        return saves_in_background(spec, sizes)[0]
    except ModelMismatchError:
        return False


def _notes(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> list[str]:
    """Return the trainer's own refusal, else its warnings."""
    try:
        return [*check_memory(spec, sizes), *saves_in_background(spec, sizes)[1]]
    except ModelMismatchError as refusal:
        return [f"the trainer will refuse to start: {refusal}"]
