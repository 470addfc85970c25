"""Whether what is offloaded fits into the hosts' memory, and a background save's copies beside it. Seen before loading.

What is refused could never have run: it counts the copies of offloaded parameters and moments alone. A save in the
background also copies what is on the GPUs; where that would leave too little, checkpoints are written while the run
waits, which copies nothing. Called by `groups` on CUDA. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppojob_api.v1alpha1.model import TrainedModel
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.layout import pools_of_roles
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.worker_groups.roles.trained import ModelSize

__all__ = ["HostNeed", "host_needs", "saves_in_background"]

_GB = 1e9
_FLOAT32, _BFLOAT16, _MOMENTS = 4, 2, 8
_SPARE = 0.1
"""Ray ends a process where more than 95 % of a host's memory is used."""
_OF_A_PROCESS = 4 * _GB
"""About what libraries, CUDA and buffers of messages take of the host in each process."""


@dataclass(frozen=True)
class HostNeed:
    """Bytes of one role on its host: copies of what is offloaded, and of what a background save copies beside them."""

    role: str
    offloaded: float
    staged: float
    num_processes: int


def host_needs(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> dict[str, list[HostNeed]]:
    """Return what the roles in `sizes` take of the host of their first rank, by that host's address.

    Each node of a pool has the same part of a role, and pools whose first ranks have one address share a host.
    """
    found: dict[str, list[HostNeed]] = {}
    pool_of = pools_of_roles(spec)
    for role, size in sizes.items():
        pool = spec.pool(pool_of[role])
        share = size.num_parameters * pool.gpus_per_node / pool.gpus
        offloaded, staged = _bytes(spec, role)
        need = HostNeed(role, share * offloaded, share * staged, pool.gpus_per_node)
        found.setdefault(size.host, []).append(need)
    return found


def saves_in_background(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> tuple[bool, list[str]]:
    """Return whether checkpoints are written in the background, and a sentence for each host that is too small for it.

    Raises:
        ModelMismatchError: a host has less memory than the copies of what is offloaded; has the numbers.
    """
    doubts: list[str] = []
    for host, roles in host_needs(spec, sizes).items():
        total = min(sizes[need.role].host_bytes for need in roles)
        offloaded = sum(need.offloaded for need in roles)
        parts = ", ".join(f"{need.role} {need.offloaded / _GB:.1f}" for need in roles if need.offloaded)
        if offloaded > total:
            raise ModelMismatchError(
                f"host {host} cannot hold what is offloaded: it has {total / _GB:.1f} GB, and {offloaded / _GB:.1f} GB "
                f"are needed: {parts}. Give the pools more memory (resourcesPerGPU.memory), use lora, or leave out "
                "model.<role>.offload of a role"
            )
        staged = sum(need.staged for need in roles)
        needed = offloaded + staged + _OF_A_PROCESS * sum(need.num_processes for need in roles)
        if spec.checkpoint.asynchronous and needed > (1 - _SPARE) * total:
            doubts.append(
                f"checkpoint.async is not followed: host {host} has {total / _GB:.1f} GB, and about "
                f"{needed / _GB:.1f} GB would be used while a checkpoint is written in the background: offloaded "
                f"{offloaded / _GB:.1f}, copied for it {staged / _GB:.1f}, the rest for the processes. The run waits "
                "for each checkpoint instead; give the pools more memory (resourcesPerGPU.memory) to avoid that"
            )
    return spec.checkpoint.asynchronous and not doubts, doubts


def _bytes(spec: PPOJobSpec, role: str) -> tuple[int, int]:
    """Return the bytes of a parameter that are offloaded, and that a background save copies from the GPU."""
    trained: dict[str, TrainedModel] = {"actor": spec.model.actor, "critic": spec.model.critic}
    model = trained.get(role)
    if model is None:
        return _BFLOAT16 * (role == "ref" and spec.model.ref.offload.parameters), 0
    if model.lora is not None:
        # A checkpoint has adapters alone, which are small.
        return _BFLOAT16 * model.offload.parameters, 0
    offloaded = _FLOAT32 * model.offload.parameters + _MOMENTS * model.offload.optimizer
    return offloaded, _FLOAT32 + _MOMENTS - offloaded
