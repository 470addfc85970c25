"""Bytes that move in a step, by link, if each response has the most tokens that the spec allows. Called by `plan`.

Each pool is assumed to have its own hosts, unless all GPUs of the job fit into one.

The links of the weights, the columns of the batch and the collectives are those of the code: `link_plans`, the columns
that each method declares, and the calls of FSDP and of the pipeline's schedule on fake tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PretrainedConfig

from ppojob_api.v1alpha1.pools import REWARD_MODEL, Role, base_role
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.train.model_fit import num_experts
from ppojob_trainer.engines.weights.plans import Receivers, engines_keep_weights, link_plans
from ppojob_trainer.planning.engine import layers_of_stage
from ppojob_trainer.planning.network import from_other_hosts
from ppojob_trainer.planning.roles import PlannedRole, passes_of
from ppojob_trainer.planning.work import Measured, Traffic
from ppojob_trainer.protocol import FIELDS, Keys
from ppojob_trainer.worker_groups.roles.actor import ActorWorker, unread_by_update
from ppojob_trainer.worker_groups.roles.critic import CriticWorker
from ppojob_trainer.worker_groups.roles.ref import RefWorker, unread_by_reference

__all__ = [
    "Link",
    "bytes_of_push",
    "links_of",
    "network_bytes",
    "network_bytes_of_generation",
    "network_bytes_of_push",
]

_BFLOAT16: Final = 2
_ROLLOUT: Final = (Keys.INPUT_IDS, Keys.RESPONSE_MASK, Keys.ROLLOUT_LOG_PROBS)
_BEFORE_UPDATES: Final = (*_ROLLOUT, Keys.TOKEN_LEVEL_SCORES, Keys.OLD_LOG_PROBS, Keys.VALUES, Keys.REF_LOG_PROB)
_GPUS_OF_A_HOST: Final = 8
_WAYS: Final = {"cuda_ipc": "on a GPU (CUDA IPC)", "nccl": "from actor rank 0 (NCCL)"}


@dataclass(frozen=True)
class Link:
    """What moves in a step: bytes of one sender or rank, and how many there are. from_other_hosts: what of them enters
    the host through the adapter of one GPU."""

    what: str
    way: str
    bytes_each: float
    number: int
    from_other_hosts: float = 0.0


def links_of(spec: PPOJobSpec, roles: Mapping[str, PlannedRole], measured: Mapping[str, Measured]) -> list[Link]:
    """Return the traffic of a step: weights, batch, each role's collectives, and those of engines over hosts."""
    engines = _engines(spec, roles["actor"].config)
    return [*_weights(spec, measured["actor"]), _batch(spec, roles), *_collectives(spec, roles, measured), *engines]


def bytes_of_push(spec: PPOJobSpec, actor: Measured) -> int:
    """Return the bytes of the weights that a push has; with adapters, those of a later one than the first."""
    if actor.changing is None or not engines_keep_weights(spec):
        return actor.num_sent * _BFLOAT16
    return actor.changing


def network_bytes(spec: PPOJobSpec, role: PlannedRole, measured: Measured, *, is_update: bool) -> Counter[str]:
    """Return what enters a rank's host from others in a pass or update over a batch, by kind, for one GPU's adapter."""
    passes, found = passes_of(spec, role), Counter[str]()
    parts: list[tuple[Traffic, float]]
    if not is_update or role.trained is None:
        parts = [(measured.traffic, passes.in_batch * _share(spec, role)), (measured.batch_traffic, 1)]
    else:
        in_minibatches = passes.in_minibatch * passes.minibatches
        parts = [(measured.update_traffic, in_minibatches), (measured.step_traffic, passes.minibatches)]
    for traffic, number in parts:
        for kind, size in traffic.from_other_hosts.items():
            found[kind] += round(size * number)
    return found


def network_bytes_of_push(spec: PPOJobSpec, actor: Measured) -> float:
    """Return the same of a push: the most of gathering the weights, and of sending them to an engine.

    Layers are sent from the first to the last, so the stages of an engine receive theirs one after the other.
    """
    gathered, stages = _gathered_from_other_hosts(spec, actor), spec.rollout.pipeline_parallel_size
    return max([gathered, *(stages * link.from_other_hosts for link in _weights_to_engines(spec, actor))])


def network_bytes_of_generation(spec: PPOJobSpec, config: PretrainedConfig) -> float:
    """Return the same of a generation, which waits for it: the most of any pool."""
    return max((link.from_other_hosts for link in _engines(spec, config)), default=0.0)


def _engines(spec: PPOJobSpec, config: PretrainedConfig) -> list[Link]:
    """Return what the engines exchange that are on several hosts, in bfloat16, for the GPU that receives the most.

    Tensor parallelism: a layer reduces the results of attention and MLP, the embedding its rows, and the output layer
    gathers the logits. Pipelines: a GPU receives its part of the hidden states and of the residual stream of each token
    from the stage before, and gathers the rest from the other GPUs of its stage.
    """
    text: Any = config.get_text_config()
    pools, size = [spec.pool(name) for name in spec.placement.rollout_pools], spec.rollout.gpus_per_replica
    parts, stages = spec.rollout.tensor_parallel_size, spec.rollout.pipeline_parallel_size
    rows = spec.data.train_batch_size * spec.rollout.samples_per_prompt / sum(pool.gpus // size for pool in pools)
    length = spec.data.max_prompt_length + spec.data.max_response_length
    hidden = _BFLOAT16 * rows * length * text.hidden_size
    reduced = hidden * (2 * layers_of_stage(text, spec.rollout) + 1)
    gathered = _BFLOAT16 * rows * spec.data.max_response_length * text.vocab_size
    passed = 2 * hidden
    found = []
    for pool in pools:
        if size <= pool.gpus_per_node:
            continue
        received, outside = [], []
        for stage in range(stages):
            group, place = range(stage * parts, (stage + 1) * parts), (stage * parts, pool.gpus_per_node)
            comes, gathers = (passed if stage else 0.0), (gathered if stage == stages - 1 else 0.0)
            received.append((2 * reduced + gathers + comes) * (parts - 1) / parts + comes / parts)
            entering = from_other_hosts("all_reduce", reduced, group, *place)
            entering += from_other_hosts("all_gather", gathers + comes, group, *place)
            if stage:
                entering += from_other_hosts("send", comes / parts, [group[0] - parts], *place, source=0)
            outside.append(entering)
        found.append(Link("engines", "between the GPUs of each engine", max(received), pool.gpus, max(outside)))
    return found


def _gathered_from_other_hosts(spec: PPOJobSpec, actor: Measured) -> float:
    share = bytes_of_push(spec, actor) / (actor.num_sent * _BFLOAT16)
    return share * sum(actor.push_traffic.from_other_hosts.values())


def _share(spec: PPOJobSpec, role: PlannedRole) -> float:
    """Return which part of the batch a role computes: of several pools with a copy of the model, each has one."""
    copies = {Role.REF.value: spec.placement.ref_pools, REWARD_MODEL: spec.placement.reward_pools}
    pools = copies.get(base_role(role.name), (role.pool,))
    return spec.pool(role.pool).gpus / sum(spec.pool(pool).gpus for pool in pools)


def _are_on_one_host(spec: PPOJobSpec) -> bool:
    return all(pool.nodes == 1 for pool in spec.pools) and sum(pool.gpus for pool in spec.pools) <= _GPUS_OF_A_HOST


def _weights(spec: PPOJobSpec, actor: Measured) -> list[Link]:
    found, size = _weights_to_engines(spec, actor), bytes_of_push(spec, actor)
    if (stages := spec.actor.pipeline_parallel_size) > 1:
        # Every stage broadcasts its layers, because every rank may be a sender.
        way, number = "between the actor's stages", spec.pool(spec.placement.actor).gpus
        outside = _gathered_from_other_hosts(spec, actor)
        found.append(Link("weights", way, size * (stages - 1) / stages, number, outside))
    return found


def _weights_to_engines(spec: PPOJobSpec, actor: Measured) -> list[Link]:
    placement, size = spec.placement, bytes_of_push(spec, actor)
    parts = spec.rollout.gpus_per_replica
    receivers = [
        Receivers(spec.pool(pool).gpus // parts * parts, pool == placement.actor, num_parts=parts)
        for pool in placement.rollout_pools
    ]
    found: dict[str, Link] = {}
    plans = link_plans(spec.device, spec.pool(placement.actor).gpus, receivers)
    senders = {plan.sender_rank for plan in plans if plan.backend == "nccl"}
    for plan in plans:
        number = found[plan.backend].number if plan.backend in found else 0
        way = _WAYS.get(plan.backend, plan.backend)
        if plan.backend == "nccl" and len(senders) > 1:
            way = f"from {len(senders)} actor ranks (NCCL)"
        # A part has a few tensors whole, such as norms; they are small.
        each = size if plan.part is None else size / parts
        from_others = each if plan.backend == "nccl" and not _are_on_one_host(spec) else 0.0
        found[plan.backend] = Link("weights", way, each, number + len(plan.receivers), from_others)
    return list(found.values())


def _batch(spec: PPOJobSpec, roles: Mapping[str, PlannedRole]) -> Link:
    """Return what all ranks fetch of the batch, and what is stored."""
    algorithm = spec.algorithm
    phases: list[tuple[Any, frozenset[str]]] = []
    if not algorithm.bypasses_old_log_probs:
        phases.append((ActorWorker.compute_log_prob, frozenset()))
    phases.append((ActorWorker.update_actor, unread_by_update(algorithm)))
    if "critic" in roles:
        phases += [(CriticWorker.compute_values, frozenset()), (CriticWorker.update_critic, frozenset())]
    if spec.placement.ref is not None:
        phases.append((RefWorker.compute_ref_log_prob, unread_by_reference(spec)))
    has = {*_BEFORE_UPDATES, Keys.ADVANTAGES, Keys.RETURNS}
    has -= set() if "critic" in roles else {Keys.VALUES}
    has -= set() if spec.placement.ref is not None else {Keys.REF_LOG_PROB}
    has -= {Keys.ROLLOUT_LOG_PROBS} if algorithm.bypasses_old_log_probs else set()
    has |= {Keys.ROUTED_EXPERTS} if spec.rollout.routing_replay else set()
    fetched = [name for method, unread in phases for name in has & (method.reads or has) - unread]
    stored = [*has, Keys.PROMPT_IDS]
    total = sum(_column(spec, name, roles["actor"].config) for name in [*fetched, *stored])
    return Link("batch", "through Ray's object stores", total, 1)


def _column(spec: PPOJobSpec, name: str, config: PretrainedConfig) -> int:
    prompt, response = spec.data.max_prompt_length, spec.data.max_response_length
    if name == Keys.ROUTED_EXPERTS:
        # The last token of a response has none.
        of_a_row = (prompt + response - 1) * _experts_of_a_token(config)
    else:
        tokens = {"prompt": prompt, "sequence": prompt + response, "response": response}[FIELDS[name].tokens]
        of_a_row = tokens * FIELDS[name].dtype.itemsize
    rows = spec.data.train_batch_size * spec.rollout.samples_per_prompt
    return rows * (of_a_row + torch.int64.itemsize)


def _experts_of_a_token(config: PretrainedConfig) -> int:
    """Return the bytes of the experts that vLLM records for a token: those of all layers, dense ones too."""
    text: Any = config.get_text_config()
    field, number = FIELDS[Keys.ROUTED_EXPERTS], num_experts(text) or 0
    dtype = field.dtype if field.wider is None or number <= torch.iinfo(field.dtype).max + 1 else field.wider
    return int(text.num_hidden_layers * (getattr(text, "num_experts_per_tok", None) or 0) * dtype.itemsize)


def _collectives(spec: PPOJobSpec, roles: Mapping[str, PlannedRole], measured: Mapping[str, Measured]) -> list[Link]:
    found = []
    for name, role in roles.items():
        passes, ranks = passes_of(spec, role), spec.pool(role.pool).gpus
        updates = passes.in_minibatch * passes.minibatches
        of_role = measured[name]
        num_passes = 1
        if name == "actor":
            is_own_reference = spec.placement.ref is not None and "ref" not in roles
            num_passes = (not spec.algorithm.bypasses_old_log_probs) + is_own_reference
        forward = passes.in_batch * num_passes * _share(spec, role)
        parts = (
            (of_role.traffic, forward),
            (of_role.batch_traffic, num_passes),
            (of_role.update_traffic, updates),
            (of_role.step_traffic, passes.minibatches),
        )
        for kind in sorted({kind for traffic, _ in parts for kind in traffic.received}):
            each = sum(number * traffic.received[kind] for traffic, number in parts)
            outside = sum(number * traffic.from_other_hosts[kind] for traffic, number in parts)
            found.append(Link(f"{name}: {kind}", "between its ranks", each, ranks, outside))
    return found
