"""Checks whether the models fit on the GPUs of their pools, before any of them is loaded.

Each role is a process, and its allocator keeps the memory of its phases: the peaks of a pool's roles add up. A role
with offload returns its memory after its phases. Before sleeping engines wake up, all roles in their pools return it.

A job is refused only if it could never run: the check counts the least that a role needs, which is weights, gradients
and AdamW's two moments, divided over the GPUs of a copy of the model, and vLLM's share. Of a pipeline, it counts the
largest stage. The memory of activations depends on how full the micro-batches are, so it is estimated for full ones,
and a pool that is too small for it gets a warning. If there is room beside all of that, models stay gathered through an
optimizer step (`stay_gathered`). Called by `groups` on CUDA, and by `planning`, which measures the activations on fake
tensors. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ppojob_api.v1alpha1.model import FrozenOffload, ModelSpec, TrainedModel
from ppojob_api.v1alpha1.pools import Role, base_role
from ppojob_api.v1alpha1.rollout import RolloutSpec
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec, Trained
from ppojob_trainer.controller.layout import pools_of_roles
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.main.memory_remedies import larger_engine, remedies_of_models, remedies_of_passes
from ppojob_trainer.worker_groups.roles.trained import ModelSize

__all__ = [
    "KNOWN_ERROR",
    "KNOWN_ERROR_OF_EXPERTS",
    "Need",
    "PoolMemory",
    "check_memory",
    "engine_weights",
    "gpus_of_a_stage",
    "known_error",
    "needs",
    "pool_memory",
    "requested_gathering",
    "stay_gathered",
]

_GB = 1e9
_FLOAT32, _BFLOAT16, _FP8 = 4, 2, 1
_OF_A_PROCESS = 2.25 * _GB
"""Of CUDA, NCCL and message buffers."""
KNOWN_ERROR: Final = 0.15
"""Measured pools used up to this share more memory than planned. A test compares it with the measured runs."""
KNOWN_ERROR_OF_EXPERTS: Final = 0.25
"""The same of a pool with a mixture of experts."""


@dataclass(frozen=True)
class Need:
    """Memory of one role on each GPU of its pool, in bytes.

    resident: stays allocated between the role's phases. activations: of a full micro-batch. gathered: further bytes if
    the model stays gathered through an optimizer step. is_returned: the role's allocator returns its memory after the
    role's phases; after_passes: but these bytes only after the update. push: the most bytes while weights are sent; 0
    if the role sends none, or it is unknown.
    """

    role: str
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    resident: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    is_returned: bool = False
    after_passes: float = 0.0
    push: float = 0.0

    @property
    def idle(self) -> float:
        """Bytes that stay allocated while other roles of the pool compute."""
        return self.resident + self.after_passes

    @property
    def total(self) -> float:
        """Bytes during the role's own phases."""
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        """Return the role with its bytes in GB (1e9)."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        shown = ", ".join(f"{name} {size / _GB:.1f}" for name, size in parts.items() if size)
        return f"{self.role} {self.total / _GB:.1f} ({shown})"


@dataclass(frozen=True)
class PoolMemory:
    """Memory on each GPU of a pool at the times when it is highest, in bytes.

    training: while the pool's roles compute, with engines that do not sleep. push: while the actor sends weights.
    generation: while engines generate. engine: vLLM's share. processes: of them for CUDA and NCCL.
    """

    training: float
    push: float
    generation: float
    engine: float
    processes: float

    @property
    def most(self) -> float:
        """The highest of them."""
        return max(self.training, self.push, self.generation)


def pool_memory(
    spec: PPOJobSpec,
    pool: str,
    peaks: Sequence[tuple[Need, float]],
    gpu_bytes: float,
    weights: float = 0.0,
    receiving: float = 0.0,
) -> PoolMemory:
    """Add up the memory of a pool's processes, without what CUDA and NCCL need (`processes` has it).

    Args:
        peaks: each role of the pool, with the most bytes that its own phases need.
        gpu_bytes: memory of a GPU.
        weights: of an engine on each of its GPUs. A sleeping engine has allocated only these when it receives others.
        receiving: more of an engine on each of its GPUs, while it receives weights.
    """
    has_rollout = pool in spec.placement.rollout_pools
    engine = spec.rollout.gpu_memory_utilization * gpu_bytes if has_rollout else 0.0
    sleeps = spec.engines_sleep_in(pool)
    kept = sum(need.idle if need.is_returned else peak for need, peak in peaks)
    # Of the roles that return their memory, one computes at a time.
    training = kept + max((peak - need.idle for need, peak in peaks if need.is_returned), default=0.0)
    resident = sum(need.resident for need, _ in peaks)
    # Beside engines that slept, the other roles have returned their memory.
    others = [need.resident if sleeps else need.idle if need.is_returned else peak for need, peak in peaks]
    # The role that sends has no more than that. In a pool without it, engines may receive.
    sending = [need.push - other for (need, _), other in zip(peaks, others, strict=True) if need.push]
    sending = sending or ([0.0] if receiving else [])
    beside = sum(others) + (weights if sleeps else engine) + receiving
    workers = sum(worker.pool == pool and worker.uses_gpu for worker in spec.workers)
    return PoolMemory(
        training=training + (0.0 if sleeps else engine),
        push=max(sending) + beside if sending else 0.0,
        generation=engine + (resident if sleeps else kept),
        engine=engine,
        processes=(len(peaks) + has_rollout + workers) * _OF_A_PROCESS,
    )


def needs(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> dict[str, list[Need]]:
    """Return what the roles in `sizes` (actor, critic, ref and reward_model or their copies) need, by pool."""
    found: dict[str, list[Need]] = {}
    model, batch, pool_of = spec.model, spec.data.train_batch_size, pools_of_roles(spec)
    trained: dict[str, tuple[TrainedModel, ActorSpec | CriticSpec]] = {
        "actor": (model.actor, spec.actor),
        "critic": (model.critic, spec.critic),
    }
    for role, size in sizes.items():
        pool = pool_of[role]
        gpus = spec.pool(pool).gpus
        tokens = partial(_tokens, spec, gpus)
        share = size.largest_stage / gpus_of_a_stage(spec, role, gpus)
        if role in trained:
            own, training = trained[role]
            full = tokens(training.mini_batch_size, training.max_tokens_per_gpu)
            adapters = share * size.in_adapters / size.num_parameters
            need = _trained(role, share, adapters, own, full * _kept(size, own, training))
            # Gradients of all trained parameters are accumulated in float32 before they are reduced to their ranks.
            gradients = 0 if own.lora is not None else _FLOAT32
            need = replace(need, gathered=_gathered(spec, role, size, gpus, gradients))
        elif base_role(role) == Role.REF:
            full = tokens(batch, spec.actor.max_tokens_per_gpu)
            need = _frozen(role, share, model.ref.offload, full * _layer(size))
            need = replace(need, gathered=_gathered(spec, role, size, gpus, 0))
        else:
            full = tokens(batch, model.reward.max_tokens_per_gpu if model.reward is not None else 0)
            need = _frozen(role, share, FrozenOffload(), full * _layer(size))
        found.setdefault(pool, []).append(need)
    return found


def gpus_of_a_stage(spec: PPOJobSpec, role: str, gpus: int) -> int:
    """Return over how many of its GPUs a role's model, or a pipeline stage of it, is divided.

    With HSDP there are several copies of it.
    """
    dividing, base = _dividing(spec), base_role(role)
    of_copy = dividing[base].gpus_of_a_copy(gpus) if base in dividing else gpus
    return of_copy // _num_stages(spec, role)


def _num_stages(spec: PPOJobSpec, role: str) -> int:
    dividing, base = _dividing(spec), base_role(role)
    return dividing[base].pipeline_parallel_size if base in dividing else 1


def _dividing(spec: PPOJobSpec) -> dict[str, Trained]:
    """Return the section that has the sizes of a role: the reference is divided like the actor."""
    return {"actor": spec.actor, "ref": spec.actor, "critic": spec.critic}


def _is_uneven(training: Trained) -> bool:
    sizes = training.tensor_parallel_size, training.pipeline_parallel_size, training.expert_parallel_size
    return max(sizes) > 1


def _tokens(spec: PPOJobSpec, gpus: int, prompts: int, most: int) -> float:
    """Return the tokens of a full micro-batch on a GPU, at most those in its part of `prompts` prompts."""
    length = spec.data.max_prompt_length + spec.data.max_response_length
    return min(most, max(1.0, prompts * spec.rollout.samples_per_prompt / gpus) * length)


def _layer(size: ModelSize, divided_by: int = 1) -> float:
    """Estimate the bytes per token that a decoder layer keeps for its backward pass, in bfloat16.

    Korthikanti et al. 2022, section 4.1, for a gated MLP without dropout and attention that keeps no scores: the inputs
    of two norms, of the projections and of the output projection, queries, keys and values; gate, up and product. Each
    expert of a token has its copy of the token, and a result.
    """
    return _BFLOAT16 * (
        (8 + 2 * size.experts_per_token / divided_by) * size.hidden + 3 * size.intermediate / divided_by
    )


def _kept(size: ModelSize, model: TrainedModel, training: ActorSpec | CriticSpec) -> float:
    """Estimate the bytes per token that a forward pass keeps."""
    layer = _layer(size, training.tensor_parallel_size)
    kept = size.layers * layer
    if model.gradient_checkpointing or model.activation_offload:
        # Compiled layers with divided experts have two parts, with an input each.
        is_divided = max(training.tensor_parallel_size, training.expert_parallel_size) > 1
        parts = 2 if model.compile and size.in_experts and is_divided else 1
        on_gpu = 0 if model.activation_offload else size.layers * parts * _BFLOAT16 * size.hidden
        # One layer at a time is recomputed or loaded back.
        kept = on_gpu + layer
    return kept


def _gathered(spec: PPOJobSpec, role: str, size: ModelSize, gpus: int, gradients: int) -> float:
    """Return the bytes of a gathered model or stage, with `gradients` bytes per parameter for its gradients.

    Of divided experts and their adapters, those of a rank are gathered; stages have as large a share of experts and of
    adapters as of all parameters. If a single GPU computes a model or stage, the gradients are accumulated in place.
    What is frozen is not gathered if a GPU has it alone.
    """
    is_summed = gpus // _num_stages(spec, role) > 1
    training, of_a_stage = _dividing(spec)[base_role(role)], gpus_of_a_stage(spec, role, gpus)
    of_other_ranks = 1 - 1 / training.expert_parallel_size
    of_stage = size.largest_stage / size.num_parameters
    in_experts = size.in_experts * of_stage
    others, experts = size.largest_stage - in_experts, in_experts * (1 - of_other_ranks)
    if gradients == 0:
        others = 0.0 if of_a_stage == training.tensor_parallel_size else others
        experts = 0.0 if of_a_stage == training.expert_parallel_size else experts
    parameters = others + experts
    adapters = (size.in_adapters - size.in_expert_adapters * of_other_ranks) * of_stage
    each, of_adapter = (_BFLOAT16 + (gradient if is_summed else 0) for gradient in (gradients, _FLOAT32))
    return parameters * each + adapters * of_adapter


def _frozen(role: str, parameters: float, offload: FrozenOffload, activations: float) -> Need:
    weights, is_offloaded = parameters * _BFLOAT16, offload.parameters
    resident = 0.0 if is_offloaded else weights
    return Need(role, weights, resident=resident, activations=activations, is_returned=is_offloaded)


def _trained(role: str, parameters: float, adapters: float, model: TrainedModel, activations: float) -> Need:
    trained = parameters if model.lora is None else adapters
    frozen = 0.0 if model.lora is None else _BFLOAT16 * parameters
    weights, gradients, moments = frozen + _FLOAT32 * trained, _FLOAT32 * trained, 2 * _FLOAT32 * trained
    resident = (0.0 if model.offload.parameters else weights) + (0.0 if model.offload.optimizer else moments)
    is_returned = model.offload.parameters or model.offload.optimizer
    return Need(role, weights, gradients, moments, resident, activations, is_returned=is_returned)


def stay_gathered(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> dict[str, bool]:
    """Return whether actor, critic and each ref stay gathered through a step: as the job sets it, else if they fit.

    They fit if all roles of the pool fit at their peaks at the same time, with the known error of a plan. A model does
    not count as fitting if it is not in `sizes`, if the sizes of its layers are unknown, or if it is divided by tensor
    parallelism, which leaves embeddings whole, into stages, whose messages are not counted here, or by expert
    parallelism, with which a GPU may have to compute more tokens than its own.
    """
    divided = {role: _is_uneven(training) for role, training in _dividing(spec).items()}
    asked = requested_gathering(spec.model)
    roles_of = {role: base for role in (*asked, *pools_of_roles(spec)) if (base := base_role(role)) in asked}
    found = {role: asked[base] is False for role, base in roles_of.items()}
    for pool, roles in needs(spec, sizes).items():
        gpu_bytes = min(sizes[need.role].gpu_bytes for need in roles)
        memory = pool_memory(spec, pool, [(need, need.total) for need in roles], gpu_bytes)
        engine = 0.0 if spec.engines_sleep_in(pool) else memory.engine
        taken = sum(need.total + need.activations + need.gathered * found.get(need.role, False) for need in roles)
        error = known_error(has_experts=any(sizes[need.role].in_experts for need in roles))
        room = gpu_bytes / (1 + error) - memory.processes - engine - taken
        for need in roles:
            base = base_role(need.role)
            is_open = asked.get(base, True) is None and not divided[base]
            if is_open and sizes[need.role].layers and need.gathered <= room:
                found[need.role] = True
                room -= need.gathered
    return found


def known_error(*, has_experts: bool) -> float:
    """Return the share by which a measured pool of this kind used more memory than planned."""
    return KNOWN_ERROR_OF_EXPERTS if has_experts else KNOWN_ERROR


def requested_gathering(model: ModelSpec) -> dict[str, bool | None]:
    """Return `reshardAfterForward` of the roles that have it."""
    return {
        "actor": model.actor.reshard_after_forward,
        "critic": model.critic.reshard_after_forward,
        "ref": model.ref.reshard_after_forward,
    }


def check_memory(spec: PPOJobSpec, sizes: Mapping[str, ModelSize]) -> list[str]:
    """Refuse a placement that cannot hold its models.

    Returns:
        A sentence for each pool that can hold its models, but probably not the activations of full micro-batches.

    Raises:
        ModelMismatchError: a GPU of a pool has less memory than its roles need at least; the message has the numbers.
    """
    warnings, asked = [], requested_gathering(spec.model)
    for pool, roles in needs(spec, sizes).items():
        gpu_bytes = min(sizes[need.role].gpu_bytes for need in roles)
        found = pool_memory(spec, pool, [(need, need.total) for need in roles], gpu_bytes)
        least = found.most
        names, parts = [need.role for need in roles], [str(need) for need in roles]
        if found.engine:
            parts.append(_engine_words(spec, sizes, found.engine))
        if least > gpu_bytes:
            raise ModelMismatchError(
                f"pool {pool} cannot hold its models: each GPU has {gpu_bytes / _GB:.1f} GB, and at least "
                f"{least / _GB:.1f} GB are needed at the same time, before any activations: {'; '.join(parts)}. "
                + remedies_of_models(spec, pool, names, sizes, is_engine=_is_of_engine(spec, pool, found, gpu_bytes))
            )
        # Models that stay gathered use only memory that is left over.
        gathered = {need.role: need.gathered for need in roles if asked.get(base_role(need.role)) is False}
        passes = [(need, need.total + need.activations + gathered.get(need.role, 0.0)) for need in roles]
        filled = pool_memory(spec, pool, passes, gpu_bytes)
        full = filled.most + filled.processes
        if full > gpu_bytes:
            activations = ", ".join(f"{need.role} {need.activations / _GB:.1f}" for need in roles)
            warnings.append(
                f"pool {pool} may run out of memory if micro-batches are full: each GPU has {gpu_bytes / _GB:.1f} "
                f"GB and about {full / _GB:.1f} GB are needed at the same time: {'; '.join(parts)}; activations at "
                f"maxTokensPerGPU {activations}. {remedies_of_passes(spec, names, sizes, gathered)}"
            )
    return warnings


def _is_of_engine(spec: PPOJobSpec, pool: str, memory: PoolMemory, gpu_bytes: float) -> bool:
    """Whether engines are allocated at a time when a pool needs more memory than its GPUs have."""
    awake = memory.generation if spec.engines_sleep_in(pool) else memory.most
    return memory.engine > 0 and awake > gpu_bytes


def engine_weights(rollout: RolloutSpec, size: ModelSize) -> float:
    """Return the bytes of the policy's weights on a GPU of an engine, at most; scales are left out.

    `rollout.quantization` leaves embeddings and the output layer in bfloat16. With pipelineParallelSize, it depends on
    the model which of them vLLM has in the largest stage: both are counted there.
    """
    ends = float(min(size.in_embeddings, size.num_parameters))
    layers, stages = size.num_parameters - ends, rollout.pipeline_parallel_size
    if stages > 1:
        layers *= math.ceil(size.layers / stages) / size.layers if size.layers else 1 / stages
    found = ends * _BFLOAT16 + layers * (_BFLOAT16 if rollout.quantization is None else _FP8)
    return found / rollout.tensor_parallel_size


def _engine_words(spec: PPOJobSpec, sizes: Mapping[str, ModelSize], engine: float) -> str:
    """Return a phrase for vLLM's share of the memory.

    Raises:
        ModelMismatchError: the weights alone do not fit into it.
    """
    share, words = spec.rollout.gpu_memory_utilization, ""
    if "actor" in sizes:
        weights = engine_weights(spec.rollout, sizes["actor"])
        words = f": weights {weights / _GB:.1f}, the rest is for the KV cache"
        if weights >= engine:
            raise ModelMismatchError(
                f"rollout.gpuMemoryUtilization {share:g} gives vLLM {engine / _GB:.1f} GB of each GPU, and its weights "
                f"alone take {weights / _GB:.1f} GB: raise it, or {larger_engine(spec.rollout)}"
            )
    return f"rollout {engine / _GB:.1f} (gpuMemoryUtilization {share:g}{words})"
