"""Seconds of each phase and of a step, from the phases of measured runs. Called by `plan` and `comparison`. Pure.

Forward passes and updates: `controller.cost_model` fits fixed seconds and seconds per operation and GPU to the measured
runs of dense models. Experts take longer than their operations: rows for them are sorted, exchanged and multiplied in
groups, and ranks wait for the busiest one. These seconds are proportional to the bytes of the rows. One rate, for all
phases and with or without expert parallelism, is what remains of the phases of the measured mixtures.

Generation: each token of the longest response takes the host's time for a decoding step, and the time in which the
memory delivers weights and cache. Weights: fixed seconds and seconds per byte where the engine copies them, and
more seconds per byte where it reloads them (`rollout.worker_extension`). Offloaded parameters are copied before and
after a phase, and an optimizer's moments after it, while the GPU does not compute. `controller.step_time` combines the
phases as the job's schedule does. All responses are taken to have the most tokens. GPUs of other kinds are faster or
slower than the measured ones by their data sheets.

The measured runs have no pipelines. The p ranks of a pipeline with v stages each wait for (p - 1) of (v m + p - 1)
passes through a stage of m micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), so what is divided
over the GPUs takes longer by that. If v is above 1, and m is no multiple of p, they also wait for the micro-batches
that would fill the last round of p, at most once in each stage but the last. Stages are taken to be equally fast, and
messages between them to cost nothing on a host.

The measured runs are of one host. The network between hosts delivers what `network` counts: weights that are gathered,
gradients that are reduced, and hidden states of stages, all while the GPUs compute, so a phase takes at least as long;
tokens for experts and keys of other ranks, for which a layer waits, take their time in addition.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ppojob_api.v1alpha1.pools import base_role
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.cost_model import Observation, fit_phase
from ppojob_trainer.controller.layout import layout_of
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.controller.step_time import StepTime, step_time
from ppojob_trainer.engines.train.fsdp.passes import in_window
from ppojob_trainer.engines.train.model_fit import (
    attention_width,
    num_experts,
)
from ppojob_trainer.main.memory_fit import engine_weights
from ppojob_trainer.planning.engine import cache_per_token, policy_size
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.roles import PlannedRole, passes_of
from ppojob_trainer.planning.traffic import (
    bytes_of_push,
    network_bytes,
    network_bytes_of_generation,
    network_bytes_of_push,
)
from ppojob_trainer.planning.work import Measured

__all__ = ["Seconds", "TimedRun", "Workload", "idle_shares", "seconds_of", "waits_of_update", "workload_of"]

_BFLOAT16: Final = 2
_COMPUTED: Final = {
    Phase.OLD_LOG_PROB: "actor",
    Phase.VALUES: "critic",
    Phase.REF: "ref",
    Phase.UPDATE_CRITIC: "critic",
    Phase.UPDATE_ACTOR: "actor",
}
_UPDATES: Final = (Phase.UPDATE_CRITIC, Phase.UPDATE_ACTOR)
_AWAITED: Final = ("exchange", "experts", "keys")
_REACHED: Final = 0.7
"""Share of the host link's rate that copies of offloaded tensors reach: 61 GB took 1.4 s of an update of 7.6 B
parameters on H200s, by what remained beside its operations (docs/measured.md)."""


@dataclass(frozen=True)
class Workload:
    """What a step computes. operations: of each phase, over all its GPUs. gpus: of each phase. decode_bytes: that an
    engine's GPU reads for one token of all its sequences. decode_steps: tokens of a response. weight_bytes: of a push.
    is_reloaded: the engine reloads its weights. expert_bytes: of the rows for experts, of each phase, over all its
    GPUs: a token's hidden state, once for each of its experts in each layer; empty without experts. host_bytes: of
    offloaded tensors, for whose copies from and to the host a GPU waits in each phase. prefetched, awaited: what comes
    from other hosts in each phase and in a push, for the adapter of one GPU: while the GPUs compute, and while they
    wait for it.
    """

    operations: Mapping[str, float]
    gpus: Mapping[str, int]
    decode_bytes: float
    decode_steps: int
    weight_bytes: float
    is_reloaded: bool = False
    expert_bytes: Mapping[str, float] = field(default_factory=dict)
    host_bytes: Mapping[str, float] = field(default_factory=dict)
    prefetched: Mapping[str, float] = field(default_factory=dict)
    awaited: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether a phase computes a mixture of experts."""
        return bool(self.expert_bytes)


@dataclass(frozen=True)
class TimedRun:
    """A measured run: its work, the seconds of its phases, and its GPU."""

    workload: Workload
    seconds: Mapping[str, float]
    gpu: Gpu


@dataclass(frozen=True)
class Seconds:
    """Seconds of each phase, and of a step. network: of each phase's traffic between hosts, which `phases` include."""

    phases: Mapping[str, float]
    step: StepTime
    network: Mapping[str, float]


def workload_of(spec: PPOJobSpec, roles: Mapping[str, PlannedRole], measured: Mapping[str, Measured]) -> Workload:
    """Return the work of a step in which each response has the most tokens."""
    layout, computed = layout_of(spec), _computed(spec, roles)
    operations = {
        phase: _operations(spec, roles[source], measured[source], is_update=phase in _UPDATES)
        for phase, source in computed.items()
    }
    expert_bytes = {
        phase: _expert_bytes(spec, roles[source], measured[source], is_update=phase in _UPDATES)
        for phase, source in computed.items()
        if measured[source].expert_layers
    }
    copied = {
        phase: _host_bytes(roles[source], measured[source], is_update=phase in _UPDATES)
        for phase, source in computed.items()
    }
    between_hosts = {phase: _network_bytes(spec, phase, source, roles, measured) for phase, source in computed.items()}
    awaited = {phase: float(sum(found[kind] for kind in _AWAITED)) for phase, found in between_hosts.items()}
    prefetched = {phase: found.total() - awaited[phase] for phase, found in between_hosts.items()}
    prompt, response = spec.data.max_prompt_length, spec.data.max_response_length
    actor: Any = roles["actor"].config.get_text_config()
    engines = max(1, layout.gpus_of(Phase.GENERATE) // spec.rollout.gpus_per_replica)
    sequences = spec.data.train_batch_size * spec.rollout.samples_per_prompt / engines
    # A stage reads its weights for each of the groups of sequences that are in the stages at the same time.
    weights = engine_weights(spec.rollout, policy_size(actor, measured["actor"].num_sent))
    weights *= spec.rollout.pipeline_parallel_size
    return Workload(
        operations=operations,
        gpus={phase: layout.gpus_of(phase) for phase in operations},
        decode_bytes=weights + sequences * (prompt + response / 2) * cache_per_token(actor, spec.rollout),
        # More sequences than an engine takes at once are generated one group after the other.
        decode_steps=response * max(1, -(-int(sequences) // spec.rollout.max_num_seqs)),
        weight_bytes=bytes_of_push(spec, measured["actor"]),
        is_reloaded=_is_reloaded(spec, actor),
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
            found |= network_bytes(spec, roles[name], measured[name], is_update=phase in _UPDATES)
    return found


def _is_reloaded(spec: PPOJobSpec, config: Any) -> bool:
    """Return whether vLLM changes weights when it loads them: those of experts, of latent attention, and quantized."""
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    return num_experts(config) is not None or is_latent or spec.rollout.quantization is not None


def _computed(spec: PPOJobSpec, roles: Mapping[str, PlannedRole]) -> dict[str, str]:
    """Return the role whose model each phase computes; if the actor is its own reference, the actor's."""
    sources = {phase: "actor" if role == "ref" and role not in roles else role for phase, role in _COMPUTED.items()}
    pool_of = layout_of(spec).pool_of
    found = {phase: role for phase, role in sources.items() if _COMPUTED[phase] in pool_of and role in roles}
    if spec.algorithm.bypasses_old_log_probs:
        del found[Phase.OLD_LOG_PROB]
    return found


def idle_shares(spec: PPOJobSpec, roles: Mapping[str, PlannedRole]) -> dict[str, float]:
    """Return the share of its time in which a stage waits for others, of each phase that a pipeline computes."""
    found = {}
    for phase, role in _computed(spec, roles).items():
        dims = roles[role].dims(spec)
        if dims.pipeline == 1:
            continue
        passes = passes_of(spec, roles[role])
        if phase in _UPDATES:
            number, waits = passes.in_minibatch, waits_of_update(passes.in_minibatch, dims.pipeline, dims.virtual)
        else:
            # Each schedule of a forward pass fills the pipeline again. A rank computes all its micro-batches in one
            # stage before it goes to the next one.
            number = passes.in_batch
            waits = math.ceil(number / in_window(dims.pipeline, dims.virtual)) * (dims.pipeline - 1)
        found[phase] = waits / (dims.virtual * number + waits)
    return found


def waits_of_update(number: int, ranks: int, virtual: int) -> int:
    """Return how many passes through a stage a rank of a pipeline waits in a minibatch of `number` micro-batches.

    Exact if ranks divide the number or `virtual` is 1, else the most.
    """
    return ranks - 1 + (virtual - 1) * (-number % ranks)


def seconds_of(
    spec: PPOJobSpec,
    work: Workload,
    gpu: Gpu,
    runs: Sequence[TimedRun],
    idle: Mapping[str, float] | None = None,
    network: float | None = None,
) -> Seconds:
    """Return the predicted seconds of a step on GPUs of one kind.

    Args:
        idle: see `idle_shares`.
        network: bytes per second that the network between hosts delivers for each GPU; None: that of `gpu`.
    """
    found: dict[str, float] = {}
    of_experts = _seconds_of_expert_bytes(runs)
    for phase in work.operations:
        if (cost := _of_operations(work, phase, gpu, runs)) is None:
            continue
        fixed, divided = cost
        divided += of_experts * work.expert_bytes.get(phase, 0.0) / gpu.bandwidth
        is_computing = 1 - (idle or {}).get(phase, 0.0)
        found[phase] = fixed + divided / work.gpus[phase] / is_computing + _of_copies(work, phase, gpu)
    generated = [run for run in runs if Phase.GENERATE in run.seconds]
    hosts = [
        run.seconds[Phase.GENERATE] / run.workload.decode_steps - run.workload.decode_bytes / run.gpu.bandwidth
        for run in generated
    ]
    if hosts:
        found[Phase.GENERATE] = work.decode_steps * (
            max(0.0, statistics.median(hosts)) + work.decode_bytes / gpu.bandwidth
        )
    if (sending := _of_weights(work, runs)) is not None:
        found[Phase.UPDATE_WEIGHTS] = sending
    network = gpu.network if network is None else network
    awaited = {phase: work.awaited.get(phase, 0.0) / network for phase in found}
    prefetched = {phase: work.prefetched.get(phase, 0.0) / network for phase in found}
    found = {phase: max(seconds, prefetched[phase]) + awaited[phase] for phase, seconds in found.items()}
    both = {phase: prefetched[phase] + awaited[phase] for phase in found}
    return Seconds(found, step_time(found, layout_of(spec)), both)


def _of_operations(work: Workload, phase: str, gpu: Gpu, runs: Sequence[TimedRun]) -> tuple[float, float] | None:
    """Return a phase's fixed seconds and GPU-seconds at the rate of dense models; None if no run has the phase."""
    dense = [run for run in runs if not run.workload.has_experts]
    seen = [run for run in dense if phase in run.seconds and phase in run.workload.operations]
    if not seen:
        return None
    loads = [run.workload.operations[phase] / run.gpu.peak_flops for run in seen]
    cost = fit_phase(
        phase,
        [
            Observation(run.workload.gpus[phase], run.seconds[phase] - _of_copies(run.workload, phase, run.gpu), load)
            for run, load in zip(seen, loads, strict=True)
        ],
    )
    share = work.operations[phase] / gpu.peak_flops / statistics.median(loads)
    return cost.fixed_s, cost.divided_gpu_s * share


def _of_copies(work: Workload, phase: str, gpu: Gpu) -> float:
    """Return the seconds in which a phase waits for copies of offloaded tensors."""
    return work.host_bytes.get(phase, 0.0) / (gpu.host * _REACHED)


def _seconds_of_expert_bytes(runs: Sequence[TimedRun]) -> float:
    """Return what experts take beyond their operations: GPU-seconds for as many bytes of rows as the GPU's memory
    delivers in a second; 0 if no run has experts.
    """
    remaining = total = 0.0
    for run in runs:
        for phase, size in run.workload.expert_bytes.items():
            cost = _of_operations(run.workload, phase, run.gpu, runs)
            if cost is not None and phase in run.seconds:
                fixed, divided = cost
                seconds = run.seconds[phase] - fixed - _of_copies(run.workload, phase, run.gpu)
                remaining += seconds * run.workload.gpus[phase] - divided
                total += size / run.gpu.bandwidth
    return max(0.0, remaining / total) if total else 0.0


def _of_weights(work: Workload, runs: Sequence[TimedRun]) -> float | None:
    """Return the seconds of a push; None if too few runs have one."""
    sent = [run for run in runs if Phase.UPDATE_WEIGHTS in run.seconds]
    reloaded = [run for run in sent if run.workload.is_reloaded]
    copied = [run for run in sent if not run.workload.is_reloaded]
    if work.is_reloaded and reloaded:
        if _have_sizes(reloaded):
            return _on_line(work, reloaded)
        of_byte = statistics.median(run.seconds[Phase.UPDATE_WEIGHTS] / run.workload.weight_bytes for run in reloaded)
        # It takes at least as long as one that copies.
        least = min((run.seconds[Phase.UPDATE_WEIGHTS] for run in copied), default=0.0)
        return max(least, work.weight_bytes * of_byte)
    return _on_line(work, copied) if _have_sizes(copied) else None


def _have_sizes(runs: Sequence[TimedRun]) -> bool:
    """Whether the pushes of some runs have different sizes."""
    return len({run.workload.weight_bytes for run in runs}) > 1


def _on_line(work: Workload, runs: Sequence[TimedRun]) -> float:
    """Return the seconds of a push by a line through the bytes and seconds of others, and no less than the shortest."""
    times = [run.seconds[Phase.UPDATE_WEIGHTS] for run in runs]
    line = statistics.linear_regression([run.workload.weight_bytes for run in runs], times)
    return max(min(times), line.intercept + line.slope * work.weight_bytes)


def _operations(spec: PPOJobSpec, role: PlannedRole, measured: Measured, *, is_update: bool) -> float:
    """Return the operations of a pass or update over a batch: PaLM, appendix B, with what is computed again."""
    config: Any = role.config.get_text_config()
    prompt, response = spec.data.max_prompt_length, spec.data.max_response_length
    rows = spec.data.train_batch_size * spec.rollout.samples_per_prompt
    width = attention_width(config)
    tokens, pairs = rows * (prompt + response), rows * (prompt + response) ** 2
    layers: float = 2 * measured.layer_parameters * tokens + 2 * config.num_hidden_layers * width * pairs
    output: float = 2 * config.vocab_size * config.hidden_size * rows * response if role.source.has_output_layer else 0
    if not is_update or role.trained is None:
        return layers + output
    has_adapters = role.trained.lora is not None
    again = 1 if role.trained.gradient_checkpointing else 0
    # Backward takes twice a forward pass; without gradients of the matrices once. The output layer's logits are
    # computed again.
    backward = 1 if has_adapters else 2
    of_adapters = 2 * measured.layer_adapters * tokens
    return spec.algorithm.epochs * (layers * (1 + again + backward) + of_adapters + output * (2 + backward))


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
