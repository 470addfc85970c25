"""The roles of a job that hold a model, and the fullest pass of each. Called by `plan`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PretrainedConfig

from ppojob_api.v1alpha1.engine import Engine
from ppojob_api.v1alpha1.model import FrozenModel, TrainedModel
from ppojob_api.v1alpha1.pools import REWARD_MODEL, Role, base_role
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.controller.layout import pools_of_roles
from ppojob_trainer.engines.train.batch import num_passes
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.divisions import check_divisions
from ppojob_trainer.engines.train.fsdp.model import LoadOptions
from ppojob_trainer.engines.train.fsdp.reward import padded_parts
from ppojob_trainer.engines.train.model_fit import check_context, check_engine_parts
from ppojob_trainer.maths.packing import micro_batches
from ppojob_trainer.planning.work import Work
from ppojob_trainer.worker_groups.roles.trained import ModelSource, dims_of

__all__ = ["Passes", "PlannedRole", "Shapes", "passes_of", "planned_roles", "work_of"]

Shapes = Callable[[str, str, bool], PretrainedConfig]
"""Field, path and trustRemoteCode -> configuration."""


@dataclass(frozen=True)
class PlannedRole:
    """One role that holds a model.

    model: None for a reward model. divided_like: the section that divides its ranks; None: FSDP alone does.
    """

    name: str
    pool: str
    config: PretrainedConfig
    source: ModelSource
    max_tokens: int
    model: TrainedModel | FrozenModel | None
    divided_like: ActorSpec | CriticSpec | None

    @property
    def trained(self) -> TrainedModel | None:
        """The options of a model that is trained; None if it only computes."""
        return self.model if isinstance(self.model, TrainedModel) else None

    @property
    def training(self) -> ActorSpec | CriticSpec | None:
        """The settings of its updates; None if it only computes."""
        return self.divided_like if self.trained is not None else None

    @property
    def offloads_parameters(self) -> bool:
        """Whether its parameters are in the host's memory between its phases."""
        return self.model is not None and self.model.offload.parameters

    @property
    def offloads_moments(self) -> bool:
        """Whether AdamW's moments are in the host's memory between updates."""
        return self.trained is not None and self.trained.offload.optimizer

    def dims(self, spec: PPOJobSpec) -> ParallelDims:
        """Return how its ranks are divided."""
        pool = spec.pool(self.pool)
        return dims_of(self.divided_like, pool.gpus, pool.gpus_per_node, self.config)

    def fewest_tokens(self, spec: PPOJobSpec) -> int:
        """Return the smallest `maxTokensPerGPU` with which a pass holds the longest sequence.

        A group of ranks that divide a sequence has a budget of as many times these tokens.
        """
        return math.ceil((spec.data.max_prompt_length + spec.data.max_response_length) / self.dims(spec).slices)


@dataclass(frozen=True)
class Passes:
    """How many sequences a rank computes at once, and how often.

    sequences: of the fullest micro-batch of a rank's whole batch. update_sequences: of that of a minibatch. in_batch:
    passes over the whole batch. in_minibatch: of an optimizer step. minibatches: optimizer steps of a training step.
    """

    sequences: int
    update_sequences: int
    in_batch: int
    in_minibatch: int
    minibatches: int


def planned_roles(spec: PPOJobSpec, shapes: Shapes) -> dict[str, PlannedRole]:
    """Return the roles that have a separate model, by name.

    Raises:
        ShapeNotFoundError: see `configs`.
        ModelMismatchError: a model cannot be divided by the sizes of the spec, or its context is too short.
        ValueError: a role has an engine of the user.
    """
    model, actor = spec.model, spec.model.actor
    for section, training in (("actor", spec.actor), ("critic", spec.critic)):
        if training.engine is not Engine.FSDP:
            raise ValueError(
                f"spec.{section}.engine: {training.engine}: a plan knows the memory of engine FSDP alone: add --set "
                f"spec.{section}.engine=FSDP"
            )
    find = partial(_role, spec, shapes)
    source = ModelSource(actor.path, actor.trust_remote_code, lora=actor.lora)
    found = [find("actor", "model.actor.path", source, actor, spec.actor)]
    if "critic" in pools_of_roles(spec):
        own = model.critic
        field, path = ("model.critic.path", own.path) if own.path else ("model.actor.path", actor.path)
        source = ModelSource(path, own.trust_remote_code, has_output_layer=False, lora=own.lora)
        found.append(find("critic", field, source, own, spec.critic))
    references, judges = (
        [role for role in pools_of_roles(spec) if base_role(role) == base] for base in (Role.REF, REWARD_MODEL)
    )
    if references and not model.reference_is_actor:
        field, path = ("model.ref.path", model.ref.path) if model.ref.path else ("model.actor.path", actor.path)
        trusts = (model.ref if model.ref.path else actor).trust_remote_code
        source = ModelSource(path, trusts)
        found += [find(role, field, source, model.ref, spec.actor) for role in references]
    if judges and model.reward is not None:
        source = ModelSource(model.reward.path, model.reward.trust_remote_code, has_output_layer=False)
        found += [find(role, "model.reward.path", source, None, None) for role in judges]
    check_engine_parts(found[0].config, spec.rollout)
    return {role.name: role for role in found}


def _role(
    spec: PPOJobSpec,
    shapes: Shapes,
    name: str,
    field: str,
    source: ModelSource,
    model: TrainedModel | FrozenModel | None,
    training: ActorSpec | CriticSpec | None,
) -> PlannedRole:
    config, pool = shapes(field, source.path, source.trust_remote_code), pools_of_roles(spec)[name]
    max_tokens = spec.model.reward.max_tokens_per_gpu if spec.model.reward is not None else 0
    if training is None or model is None:
        config.num_labels, config.pad_token_id = max(1, config.num_labels or 1), config.pad_token_id or 0
    else:
        max_tokens = training.max_tokens_per_gpu
        section = "critic" if isinstance(training, CriticSpec) else "actor"
        sizes = {
            "tensorParallelSize": training.tensor_parallel_size,
            "sequenceParallelSize": training.sequence_parallel_size,
            "pipelineParallelSize": training.pipeline_parallel_size,
            "virtualPipelineParallelSize": training.virtual_pipeline_parallel_size,
            "expertParallelSize": training.expert_parallel_size,
        }
        per_host = spec.pool(pool).gpus_per_node
        check_divisions(config, {f"{section}.{size}": number for size, number in sizes.items()}, per_host)
        check_context(base_role(name), source.path, config, spec.data)
    return PlannedRole(name, pool, config, source, max_tokens, model, training)


def passes_of(spec: PPOJobSpec, role: PlannedRole) -> Passes:
    """Return a role's passes if each sequence has the most tokens that the spec allows.

    Raises:
        ValueError: a single sequence is longer than `maxTokensPerGPU`.
    """
    dims = role.dims(spec)
    ranks = dims.num_shards
    length = spec.data.max_prompt_length + spec.data.max_response_length
    samples = spec.rollout.samples_per_prompt
    whole = _rows(spec.data.train_batch_size * samples, ranks)
    if base_role(role.name) == REWARD_MODEL:
        parts = padded_parts([length] * whole, role.max_tokens)
        return Passes(max(map(len, parts)), 0, len(parts), 0, 0)
    most = role.max_tokens * dims.slices
    batch = _micro_batches(length, whole, most, dims)
    if role.training is None:
        return Passes(max(map(len, batch)), 0, len(batch), 0, 0)
    part = _micro_batches(length, _rows(role.training.mini_batch_size * samples, ranks), most, dims)
    updates = spec.data.train_batch_size // role.training.mini_batch_size * spec.algorithm.epochs
    return Passes(max(map(len, batch)), max(map(len, part)), len(batch), len(part), updates)


def work_of(spec: PPOJobSpec, role: PlannedRole, *, stays_gathered: bool) -> Work:
    """Return what `role_memory` runs for a role."""
    passes = passes_of(spec, role)
    options = LoadOptions(role.source.trust_remote_code, dtype=torch.bfloat16, is_frozen=True)
    if role.model is not None:
        options = LoadOptions.of(role.model, torch.bfloat16, stays_gathered=stays_gathered)
    return Work(
        kind=base_role(role.name),
        config=role.config,
        options=options,
        dims=role.dims(spec),
        sequences=passes.sequences,
        update_sequences=passes.update_sequences,
        num_passes=passes.in_minibatch,
        num_forward=passes.in_batch,
        prompt_tokens=spec.data.max_prompt_length,
        response_tokens=spec.data.max_response_length,
        training=role.training,
        per_host=spec.pool(role.pool).gpus_per_node,
    )


def _micro_batches(length: int, rows: int, most: int, dims: ParallelDims) -> list[list[int]]:
    """Return the micro-batches of equal sequences, as many as the engine computes."""
    lengths = [length] * rows
    return micro_batches(lengths, most, num_passes(lengths, most, dims.pipeline, dims.virtual))


def _rows(sequences: int, ranks: int) -> int:
    return -(-sequences // ranks)
