"""Whether the models can fit on the GPUs of their pools, seen before any of them is loaded.

What is counted is the least that a role needs: weights, gradients and AdamW's two moments, divided over the pool's
GPUs, and vLLM's share. Activations, buffers and the reward model come on top, so what is refused here could never have
run, and what passes still may not. Called by `groups` on CUDA. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppojob_api.v1alpha1.model import FrozenOffload, TrainedModel
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.worker_groups.roles.trained import ModelSize

__all__ = ["Need", "check_memory", "needs"]

_GB = 1e9
_FLOAT32, _BFLOAT16 = 4, 2


@dataclass(frozen=True)
class Need:
    """Bytes of one role on each GPU of its pool. resident: what stays there between the role's phases."""

    role: str
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    resident: float = 0.0

    @property
    def total(self) -> float:
        """Bytes within the role's own phases."""
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        """Return the role with its bytes in GB (1e9)."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        shown = ", ".join(f"{name} {size / _GB:.1f}" for name, size in parts.items() if size)
        return f"{self.role} {self.total / _GB:.1f} ({shown})"


def needs(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> dict[str, list[Need]]:
    """Return what the roles in `sizes` (actor, critic, ref) need at the least, by pool."""
    found: dict[str, list[Need]] = {}
    model, gpus = spec.model, {role: spec.pool(getattr(spec.placement, role)).gpus for role in sizes}
    share = {role: size.num_parameters / gpus[role] for role, size in sizes.items()}
    for role in sizes:
        if role == "ref":
            need = _frozen(role, share[role], model.ref.offload)
        else:
            need = _trained(role, share[role], model.actor if role == "actor" else model.critic)
        found.setdefault(getattr(spec.placement, role), []).append(need)
    return found


def _frozen(role: str, parameters: float, offload: FrozenOffload) -> Need:
    weights = parameters * _BFLOAT16
    return Need(role, weights, resident=0.0 if offload.parameters else weights)


def _trained(role: str, parameters: float, model: TrainedModel) -> Need:
    if model.lora is not None:
        return _frozen(role, parameters, model.offload)
    weights, moments = _FLOAT32 * parameters, 2 * _FLOAT32 * parameters
    resident = (0.0 if model.offload.parameters else weights) + (0.0 if model.offload.optimizer else moments)
    return Need(role, weights, weights, moments, resident)


def check_memory(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> None:
    """Refuse a placement that cannot hold its models.

    Raises:
        ModelMismatchError: a GPU of a pool has less than the roles there need at the least; has the numbers.
    """
    for pool, roles in needs(spec, sizes).items():
        gpu_bytes = min(sizes[need.role].gpu_bytes for need in roles)
        has_rollout = spec.placement.rollout == pool
        engine = spec.rollout.gpu_memory_utilization * gpu_bytes if has_rollout else 0.0
        resident = sum(need.resident for need in roles)
        training = resident + max(need.total - need.resident for need in roles) + (0 if spec.rollout.sleep else engine)
        least = max(training, resident + engine)
        if least > gpu_bytes:
            parts = [str(need) for need in roles]
            if has_rollout:
                share = spec.rollout.gpu_memory_utilization
                parts.append(f"rollout {engine / _GB:.1f} (gpuMemoryUtilization {share:g})")
            raise ModelMismatchError(
                f"pool {pool} cannot hold its models: each GPU has {gpu_bytes / _GB:.1f} GB, and at least "
                f"{least / _GB:.1f} GB are needed at the same time, before any activations: {'; '.join(parts)}. Give "
                "the pool more GPUs, move a role to another pool, use lora or offload, or lower "
                "rollout.gpuMemoryUtilization"
            )
