"""What a step computes, reads and sends, for `seconds`: operations, bytes and tokens of each phase. Pure.

Called by `report`, `comparison` and `seconds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ppojob_api.v1alpha1.pools import base_role
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.layout import layout_of
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.engines.train.model_fit import attention_width, num_experts
from ppojob_trainer.main.memory_fit import engine_weights
from ppojob_trainer.planning.engine import cache_per_token, policy_size
from ppojob_trainer.planning.roles import PlannedRole
from ppojob_trainer.planning.traffic import (
    bytes_of_push,
    network_bytes,
    network_bytes_of_generation,
    network_bytes_of_push,
)
from ppojob_trainer.planning.work import Measured

__all__ = ["UPDATES", "Workload", "sources_of", "workload_of"]

UPDATES: Final = (Phase.UPDATE_CRITIC, Phase.UPDATE_ACTOR)
_BFLOAT16: Final = 2
_COMPUTED: Final = {
    Phase.OLD_LOG_PROB: "actor",
    Phase.VALUES: "critic",
    Phase.REF: "ref",
    Phase.UPDATE_CRITIC: "critic",
    Phase.UPDATE_ACTOR: "actor",
}
_AWAITED: Final = ("exchange", "experts", "keys")
_LONG: Final = 0.25
"""Share of attention's products of queries, keys and values in a phase's operations from which its rate is not that of
the other runs. Workload W has 0.02, sequences of 32k tokens with 1.5 B parameters 0.5."""


@dataclass(frozen=True)
class Workload:
    """What a step computes. operations: of each phase, over all its GPUs. gpus: of each phase. pairs: the part of the
    operations that is attention between two tokens. decode_bytes, decode_operations: of an engine's GPU, for one token
    of all `decode_sequences` that it generates at once. decode_steps: such tokens in a step. weight_bytes: of a push.
    is_reloaded: the engine reloads its weights. expert_bytes: of the rows for experts, of each phase, over all its
    GPUs: a token's hidden state, once for each of its experts in each layer; empty without experts. host_bytes: of
    offloaded tensors, for whose copies from and to the host a GPU waits in each phase. prefetched, awaited: what comes
    from other hosts in each phase and in a push, for the adapter of one GPU: while the GPUs compute, and while they
    wait for it.
    """

    operations: Mapping[str, float]
    gpus: Mapping[str, int]
    decode_bytes: float
    decode_operations: float
    decode_sequences: float
    decode_steps: int
    weight_bytes: float
    is_reloaded: bool = False
    pairs: Mapping[str, float] = field(default_factory=dict)
    expert_bytes: Mapping[str, float] = field(default_factory=dict)
    host_bytes: Mapping[str, float] = field(default_factory=dict)
    prefetched: Mapping[str, float] = field(default_factory=dict)
    awaited: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether a phase computes a mixture of experts."""
        return bool(self.expert_bytes)

    @property
    def is_long(self) -> bool:
        """Whether attention is a large part of a phase."""
        return any(self.pairs.get(phase, 0.0) > _LONG * size for phase, size in self.operations.items())


def workload_of(spec: PPOJobSpec, roles: Mapping[str, PlannedRole], measured: Mapping[str, Measured]) -> Workload:
    """Return the work of a step in which each response has the most tokens."""
    layout, computed = layout_of(spec), sources_of(spec, roles)
    operations, pairs = {}, {}
    for phase, source in computed.items():
        found = _operations(spec, roles[source], measured[source], is_update=phase in UPDATES)
        operations[phase], pairs[phase] = found
    expert_bytes = {
        phase: _expert_bytes(spec, roles[source], measured[source], is_update=phase in UPDATES)
        for phase, source in computed.items()
        if measured[source].expert_layers
    }
    copied = {
        phase: _host_bytes(roles[source], measured[source], is_update=phase in UPDATES)
        for phase, source in computed.items()
    }
    between_hosts = {phase: _network_bytes(spec, phase, source, roles, measured) for phase, source in computed.items()}
    awaited = {phase: float(sum(found[kind] for kind in _AWAITED)) for phase, found in between_hosts.items()}
    prefetched = {phase: found.total() - awaited[phase] for phase, found in between_hosts.items()}
    prompt, response = spec.data.max_prompt_length, spec.data.max_response_length
    actor: Any = roles["actor"].config.get_text_config()
    engines = max(1, layout.gpus_of(Phase.GENERATE) // spec.rollout.gpus_per_replica)
    sequences = spec.data.train_batch_size * spec.rollout.samples_per_prompt / engines
    at_once = min(sequences, spec.rollout.max_num_seqs)
    of_token: float = 2 * (measured["actor"].layer_parameters + actor.vocab_size * actor.hidden_size)
    # A stage reads its weights for each of the groups of sequences that are in the stages at the same time.
    weights = engine_weights(spec.rollout, policy_size(actor, measured["actor"].num_sent))
    weights *= spec.rollout.pipeline_parallel_size
    return Workload(
        operations=operations,
        gpus={phase: layout.gpus_of(phase) for phase in operations},
        decode_bytes=weights + at_once * (prompt + response / 2) * cache_per_token(actor, spec.rollout),
        decode_operations=at_once * of_token / spec.rollout.gpus_per_replica,
        decode_sequences=at_once,
        # More sequences than an engine takes at once are generated one group after the other.
        decode_steps=response * max(1, -(-int(sequences) // spec.rollout.max_num_seqs)),
        weight_bytes=bytes_of_push(spec, measured["actor"]),
        is_reloaded=_is_reloaded(spec, actor),
        pairs=pairs,
        expert_bytes=expert_bytes,
        host_bytes={phase: size for phase, size in copied.items() if size},
        prefetched=prefetched | {Phase.UPDATE_WEIGHTS: network_bytes_of_push(spec, measured["actor"])},
        awaited=awaited | {Phase.GENERATE: network_bytes_of_generation(spec, roles["actor"].config)},
    )


def _network_bytes(
    spec: PPOJobSpec, phase: str, source: str, roles: Mapping[str, PlannedRole], measured: Mapping[str, Measured]
) -> Counter[str]:
    """Return what enters a rank's host from others in a phase; of several pools with the model, the most of any."""
    found = Counter[str]()
    for name in roles:
        if base_role(name) == source:
            found |= network_bytes(spec, roles[name], measured[name], is_update=phase in UPDATES)
    return found


def _is_reloaded(spec: PPOJobSpec, config: Any) -> bool:
    """Return whether vLLM changes weights when it loads them: those of experts, of latent attention, and quantized."""
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    return num_experts(config) is not None or is_latent or spec.rollout.quantization is not None


def sources_of(spec: PPOJobSpec, roles: Mapping[str, PlannedRole]) -> dict[str, str]:
    """Return the role whose model each phase computes; if the actor is its own reference, the actor's."""
    sources = {phase: "actor" if role == "ref" and role not in roles else role for phase, role in _COMPUTED.items()}
    pool_of = layout_of(spec).pool_of
    found = {phase: role for phase, role in sources.items() if _COMPUTED[phase] in pool_of and role in roles}
    if spec.algorithm.bypasses_old_log_probs:
        del found[Phase.OLD_LOG_PROB]
    return found


def _operations(spec: PPOJobSpec, role: PlannedRole, measured: Measured, *, is_update: bool) -> tuple[float, float]:
    """Return the operations of a pass or update over a batch, and those of them that attention has for pairs of tokens.

    PaLM, appendix B, with what is computed again.
    """
    config: Any = role.config.get_text_config()
    prompt, response = spec.data.max_prompt_length, spec.data.max_response_length
    rows = spec.data.train_batch_size * spec.rollout.samples_per_prompt
    tokens, length = rows * (prompt + response), prompt + response
    pairs: float = 2 * config.num_hidden_layers * attention_width(config) * tokens * length
    matrices: float = 2 * measured.layer_parameters * tokens
    output: float = 2 * config.vocab_size * config.hidden_size * rows * response if role.source.has_output_layer else 0
    if not is_update or role.trained is None:
        return matrices + pairs + output, pairs
    again = 1 if role.trained.gradient_checkpointing else 0
    # Backward takes twice a forward pass; without gradients of the matrices once. The output layer's logits are
    # computed again.
    backward = 1 if role.trained.lora is not None else 2
    of_adapters = 2 * measured.layer_adapters * tokens
    trained = matrices * (1 + again + backward) + of_adapters + output * (2 + backward)
    pairs *= 3 + again
    return spec.algorithm.epochs * (trained + pairs), spec.algorithm.epochs * pairs


def _host_bytes(role: PlannedRole, measured: Measured, *, is_update: bool) -> float:
    """Return the bytes of offloaded tensors for whose copies a pass or update waits: only an update changes them.

    The moments arrive beside the update's first passes, so it waits for their way back alone.
    """
    weights = measured.weights if role.offloads_parameters else 0
    moments = measured.optimizer if role.offloads_moments else 0
    return float(2 * weights + moments if is_update and role.trained is not None else weights)


def _expert_bytes(spec: PPOJobSpec, role: PlannedRole, measured: Measured, *, is_update: bool) -> float:
    """Return the bytes of the rows for experts of a pass or update over a batch.

    Gradients take the same way as the rows of a forward pass, whether experts are trained or not.
    """
    config: Any = role.config.get_text_config()
    rows = spec.data.train_batch_size * spec.rollout.samples_per_prompt
    tokens = rows * (spec.data.max_prompt_length + spec.data.max_response_length)
    of_pass = float(tokens * config.num_experts_per_tok * config.hidden_size * measured.expert_layers * _BFLOAT16)
    if not is_update or role.trained is None:
        return of_pass
    again = 1 if role.trained.gradient_checkpointing else 0
    return spec.algorithm.epochs * of_pass * (2 + again)
