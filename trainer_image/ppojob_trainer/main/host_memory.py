"""Checks before loading whether the hosts have enough memory for offloaded state and for background saves.

A job is refused only if it could never run: the check counts only the copies of offloaded parameters and moments. A
background save also copies what is on the GPUs. If that leaves too little memory, checkpoints are written while the run
waits, which copies nothing. Called by `groups` on CUDA, and by `planning`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppojob_api.v1alpha1.model import TrainedModel
from ppojob_api.v1alpha1.pools import Pool, Role, base_role
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.layout import pools_of_roles
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.main.memory_fit import gpus_of_a_stage
from ppojob_trainer.main.memory_remedies import remedies_of_offloads
from ppojob_trainer.worker_groups.roles.trained import ModelSize

__all__ = ["OF_A_PROCESS", "HostNeed", "host_needs", "saves_in_background"]

_GB = 1e9
_FLOAT32, _BFLOAT16, _MOMENTS = 4, 2, 8
_SPARE = 0.1
"""Ray terminates a process when more than 95 % of a host's memory is used."""
OF_A_PROCESS = 4 * _GB
"""Approximate host memory of each process for libraries, CUDA and message buffers, in bytes."""


@dataclass(frozen=True)
class HostNeed:
    """Host memory of one role, in bytes: copies of offloaded state, and the further copies of a background save."""

    role: str
    offloaded: float
    staged: float
    num_processes: int


def host_needs(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> dict[str, list[HostNeed]]:
    """Return the host memory that the roles in `sizes` need, by the address of the host of their first rank.

    Each node of a pool has an equal part of a role; if pipeline stages differ, the largest part of a node is returned.
    Pools whose first ranks have the same address share a host.
    """
    found: dict[str, list[HostNeed]] = {}
    pool_of = pools_of_roles(spec)
    for role, size in sizes.items():
        pool = spec.pool(pool_of[role])
        share = _most_of_a_node(size, pool) / gpus_of_a_stage(spec, role, pool.gpus)
        offloaded, staged = _bytes(spec, role, size.in_adapters / size.num_parameters)
        need = HostNeed(role, share * offloaded, share * staged, pool.gpus_per_node)
        found.setdefault(size.host, []).append(need)
    return found


def _most_of_a_node(size: ModelSize, pool: Pool) -> int:
    """Return the sum of the parameters of the stages of a node's GPUs, of the node where it is largest.

    A stage counts once for each of its GPUs.
    """
    stages = size.stages or (size.num_parameters,)
    of_gpus = [stage for stage in stages for _ in range(pool.gpus // len(stages))]
    return max(sum(of_gpus[first : first + pool.gpus_per_node]) for first in range(0, pool.gpus, pool.gpus_per_node))


def saves_in_background(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> tuple[bool, list[str]]:
    """Return whether checkpoints are written in the background, and a sentence for each host that is too small for it.

    Raises:
        ModelMismatchError: a host has less memory than the copies of offloaded state need; the message has the numbers.
    """
    warnings: list[str] = []
    for host, roles in host_needs(spec, sizes).items():
        total = min(sizes[need.role].host_bytes for need in roles)
        offloaded = sum(need.offloaded for need in roles)
        offloading = {need.role: need.offloaded for need in roles if need.offloaded}
        parts = ", ".join(f"{role} {size / _GB:.1f}" for role, size in offloading.items())
        if offloaded > total:
            raise ModelMismatchError(
                f"host {host} cannot hold the offloaded tensors: it has {total / _GB:.1f} GB, and "
                f"{offloaded / _GB:.1f} GB are needed: {parts}. {remedies_of_offloads(spec, list(offloading), sizes)}"
            )
        staged = sum(need.staged for need in roles)
        needed = offloaded + staged + OF_A_PROCESS * sum(need.num_processes for need in roles)
        if spec.checkpoint.asynchronous and needed > (1 - _SPARE) * total:
            warnings.append(
                f"checkpoint.async is not applied: host {host} has {total / _GB:.1f} GB, and about "
                f"{needed / _GB:.1f} GB would be needed while a checkpoint is written in the background: offloaded "
                f"{offloaded / _GB:.1f}, copied for it {staged / _GB:.1f}, the rest for the processes. The run waits "
                "for each checkpoint instead; give the pools more memory (resourcesPerGPU.memory) to avoid that"
            )
    return spec.checkpoint.asynchronous and not warnings, warnings


def _bytes(spec: PPOJobSpec, role: str, adapters: float) -> tuple[float, float]:
    """Return the bytes per parameter that are offloaded, and those that a background save copies from the GPU.

    adapters: parameters of adapters for each parameter of the model.
    """
    trained: dict[str, TrainedModel] = {"actor": spec.model.actor, "critic": spec.model.critic}
    model = trained.get(role)
    if model is None:
        return _BFLOAT16 * (base_role(role) == Role.REF and spec.model.ref.offload.parameters), 0
    offloaded = _FLOAT32 * model.offload.parameters + _MOMENTS * model.offload.optimizer
    staged = _FLOAT32 + _MOMENTS - offloaded
    if model.lora is not None:
        # With LoRA, a checkpoint has only the adapters.
        return _BFLOAT16 * model.offload.parameters + adapters * offloaded, adapters * staged
    return offloaded, staged
