"""What to change in a job whose models or activations do not fit: fields that this job has, and that would help.

Adapters cannot change in a job that runs (`fixed`), so they are proposed last, for another one.

Called by `memory_fit` and `host_memory` for the messages of their checks. `planning.remedies` has values, too. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ppojob_api.v1alpha1.model import TrainedModel
from ppojob_api.v1alpha1.pools import REWARD_MODEL, Role, base_role
from ppojob_api.v1alpha1.rollout import RolloutSpec
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.worker_groups.roles.trained import ModelSize

__all__ = [
    "has_large_adapters",
    "larger_engine",
    "remedies_of_models",
    "remedies_of_offloads",
    "remedies_of_passes",
]

_OF_ADAPTER, _OF_FROZEN = 16, 2
"""Bytes of a parameter of an adapter, with gradient and moments, and of a frozen parameter."""
_NOTABLE = 0.05
"""Smaller adapters are proposed if theirs take this share of the memory of the frozen weights."""


def remedies_of_models(
    spec: PPOJobSpec, pool: str, roles: Sequence[str], sizes: Mapping[str, ModelSize], *, is_engine: bool
) -> str:
    """Return a sentence on a pool that cannot hold its models.

    Args:
        roles: of the pool that have a model.
        is_engine: the memory of the pool's engines is part of what does not fit.
    """
    found = ["give the pool more GPUs"]
    if len(roles) > 1 or is_engine:
        found.append("move a role to another pool")
    # A role needs all of its memory in its own phases: offload makes room for other roles, and for engines that slept.
    makes_room = len(roles) > 1 or (is_engine and spec.engines_sleep_in(pool))
    if makes_room and (fields := [f"model.{role}.offload" for role in _without_offload(spec, roles)]):
        found.append(f"use {_either(fields)}")
    if is_engine:
        if not spec.rollout.sleep and pool in (spec.placement.actor, spec.placement.critic):
            found.append("set rollout.sleep: true")
        found.append("lower rollout.gpuMemoryUtilization")
    return _sentence([*found, *_other_adapters(spec, roles, sizes)])


def remedies_of_passes(
    spec: PPOJobSpec, roles: Sequence[str], sizes: Mapping[str, ModelSize], gathered: Iterable[str]
) -> str:
    """Return a sentence on a pool without room for full micro-batches.

    Args:
        roles: of the pool that have a model.
        gathered: those that stay gathered because the job says so.
    """
    budgets = (_budget(spec, role) for role in roles)
    found = [f"lower {field} (now {most})" for field, most, least in dict.fromkeys(budgets) if most > least]
    for role, model in _trained(spec, roles):
        if not model.gradient_checkpointing and not model.activation_offload:
            found.append(f"set model.{role}.gradientCheckpointing: true")
    fields = dict.fromkeys(f"model.{base_role(role)}.reshardAfterForward" for role in gathered)
    found += [f"remove {field}" for field in fields]
    return _sentence([*found, "give the pool more GPUs", *_other_adapters(spec, roles, sizes)])


def remedies_of_offloads(spec: PPOJobSpec, roles: Sequence[str], sizes: Mapping[str, ModelSize]) -> str:
    """Return a sentence on a host that cannot hold what these roles offload."""
    fields = dict.fromkeys(f"model.{base_role(role)}.offload" for role in roles)
    return _sentence(
        [
            "give the pools more memory (resourcesPerGPU.memory)",
            f"leave out {_either(list(fields))}",
            *_other_adapters(spec, roles, sizes),
        ]
    )


def larger_engine(rollout: RolloutSpec) -> str:
    """Return the fields that divide an engine over more GPUs, with their present values."""
    tensor = f"rollout.tensorParallelSize (now {rollout.tensor_parallel_size})"
    if rollout.speculative is not None or rollout.routing_replay:
        # Engines with stages have neither.
        return tensor
    return f"{tensor} or rollout.pipelineParallelSize (now {rollout.pipeline_parallel_size})"


def has_large_adapters(in_adapters: int, frozen: int) -> bool:
    """Whether smaller adapters would help; both are numbers of parameters."""
    return _OF_ADAPTER * in_adapters >= _NOTABLE * _OF_FROZEN * frozen


def _other_adapters(spec: PPOJobSpec, roles: Sequence[str], sizes: Mapping[str, ModelSize]) -> list[str]:
    """Return the proposal of another job, whose adapters need less memory; empty if none would help."""
    found = list(_smaller_adapters(spec, roles, sizes))
    return [f"create another PPOJob with {_either(found)}"] if found else []


def _smaller_adapters(spec: PPOJobSpec, roles: Sequence[str], sizes: Mapping[str, ModelSize]) -> Iterator[str]:
    """Yield adapters for roles that train all parameters, and smaller ones for roles whose adapters are large."""
    for role, model in _trained(spec, roles):
        lora, size = model.lora, sizes[role]
        if lora is None:
            yield f"model.{role}.lora"
        elif has_large_adapters(size.in_adapters, size.num_parameters):
            if lora.rank > 1:
                yield f"a smaller model.{role}.lora.rank (now {lora.rank})"
            if len(lora.target_modules) != 1:
                yield f"fewer layers in model.{role}.lora.targetModules{_of_experts(size)}"


def _of_experts(size: ModelSize) -> str:
    """Return a remark if the experts have most of the adapters."""
    share = size.in_expert_adapters / size.in_adapters
    return f" (experts have {share:.0%} of the adapters)" if share > 0.5 else ""


def _trained(spec: PPOJobSpec, roles: Sequence[str]) -> Iterator[tuple[str, TrainedModel]]:
    models: dict[str, TrainedModel] = {"actor": spec.model.actor, "critic": spec.model.critic}
    return ((role, models[role]) for role in roles if role in models)


def _without_offload(spec: PPOJobSpec, roles: Sequence[str]) -> list[str]:
    """Return the sections in `model` of the roles that could offload more; a reward model cannot."""
    trained = _trained(spec, roles)
    found = [role for role, model in trained if not (model.offload.parameters and model.offload.optimizer)]
    if any(base_role(role) == Role.REF for role in roles) and not spec.model.ref.offload.parameters:
        found.append(Role.REF.value)
    return found


def _budget(spec: PPOJobSpec, role: str) -> tuple[str, int, int]:
    """Return the field with the most tokens of a role's micro-batch, its value, and the least that it may be."""
    length = spec.data.max_prompt_length + spec.data.max_response_length
    if base_role(role) == REWARD_MODEL:
        return "model.reward.maxTokensPerGPU", spec.model.reward.max_tokens_per_gpu if spec.model.reward else 0, length
    # The reference has the budget of the actor.
    section, training = ("critic", spec.critic) if role == Role.CRITIC else ("actor", spec.actor)
    least = math.ceil(length / training.sequence_parallel_size)
    return f"{section}.maxTokensPerGPU", training.max_tokens_per_gpu, least


def _either(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _sentence(changes: Sequence[str]) -> str:
    """Return the changes as a sentence without a full stop."""
    *others, last = changes
    words = f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}" if others else last
    return words[0].upper() + words[1:]
