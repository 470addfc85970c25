"""Seconds of each phase and of a step, from the phases of measured runs. Called by `plan` and `comparison`. Pure.

Forward passes and updates: `controller.cost_model` fits fixed seconds and seconds per operation and GPU to the measured
runs of dense models. Experts take longer than their operations: rows for them are sorted, exchanged and multiplied in
groups, and ranks wait for the busiest one. These seconds are proportional to the bytes of the rows. One rate, for all
phases and with or without expert parallelism, is what remains of the phases of the measured mixtures. Attention reaches
a lower rate than products of matrices, which long sequences show: the seconds for its operations are what remains of
the phases of the measured runs in which it is a large part.

Generation: each token of the longest response takes the host's time for a decoding step, which grows with the
sequences, the time in which the memory delivers weights and cache, and that of the operations. Weights: fixed seconds
and seconds per byte where the engine copies them, and more seconds per byte where it reloads them
(`rollout.worker_extension`). Offloaded parameters are copied before and after a phase, and an optimizer's moments after
it, while the GPU does not compute. `controller.step_time` combines the phases as the job's schedule does. All responses
are taken to have the most tokens. GPUs of other kinds are faster or slower than the measured ones by their data sheets.

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

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.cost_model import Observation, fit_phase
from ppojob_trainer.controller.layout import layout_of
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.controller.step_time import StepTime, step_time
from ppojob_trainer.engines.train.fsdp.passes import in_window
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.roles import PlannedRole, passes_of
from ppojob_trainer.planning.workload import UPDATES, Workload, sources_of

__all__ = ["Seconds", "TimedRun", "idle_shares", "seconds_of", "waits_of_update"]

_REACHED: Final = 0.7
"""Share of the host link's rate that copies of offloaded tensors reach: 61 GB took 1.4 s of an update of 7.6 B
parameters on H200s, by what remained beside its operations (docs/measured.md)."""


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


def idle_shares(spec: PPOJobSpec, roles: Mapping[str, PlannedRole]) -> dict[str, float]:
    """Return the share of its time in which a stage waits for others, of each phase that a pipeline computes."""
    found = {}
    for phase, role in sources_of(spec, roles).items():
        dims = roles[role].dims(spec)
        if dims.pipeline == 1:
            continue
        passes = passes_of(spec, roles[role])
        if phase in UPDATES:
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
    of_experts, of_pairs = _seconds_of_expert_bytes(runs), _seconds_of_pairs(runs)
    for phase in work.operations:
        if (cost := _of_operations(work, phase, gpu, runs)) is None:
            continue
        fixed, divided = cost
        divided += of_experts * work.expert_bytes.get(phase, 0.0) / gpu.bandwidth
        divided += of_pairs * work.pairs.get(phase, 0.0) / gpu.peak_flops
        is_computing = 1 - (idle or {}).get(phase, 0.0)
        found[phase] = fixed + divided / work.gpus[phase] / is_computing + _of_copies(work, phase, gpu)
    if (generating := _of_generation(work, gpu, runs)) is not None:
        found[Phase.GENERATE] = generating
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
    dense = [
        run
        for run in runs
        if not run.workload.has_experts and phase in run.seconds and phase in run.workload.operations
    ]
    # Long sequences have another rate, see `_seconds_of_pairs`.
    seen = [run for run in dense if not run.workload.is_long] or dense
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


def _of_generation(work: Workload, gpu: Gpu, runs: Sequence[TimedRun]) -> float | None:
    """Return the seconds of generation; None if no run has any.

    What a decoding step takes beside its bytes and operations is the host's, by a line over the engine's sequences. The
    line is that of Theil (1950) and Sen (1968), which slow hosts among the runs hardly move.
    """
    seen = [run for run in runs if Phase.GENERATE in run.seconds]
    if not seen:
        return None
    points = [
        (
            run.workload.decode_sequences,
            run.seconds[Phase.GENERATE] / run.workload.decode_steps - _of_decoding(run.workload, run.gpu),
        )
        for run in seen
    ]
    slopes = [(b - a) / (y - x) for (x, a), (y, b) in itertools.combinations(points, 2) if x != y]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    fixed = max(0.0, statistics.median(seconds - slope * number for number, seconds in points))
    return work.decode_steps * (fixed + slope * work.decode_sequences + _of_decoding(work, gpu))


def _of_decoding(work: Workload, gpu: Gpu) -> float:
    """Return the seconds of a decoding step on the GPU: those of its memory, and those of its arithmetic."""
    return work.decode_bytes / gpu.bandwidth + work.decode_operations / gpu.peak_flops


def _of_copies(work: Workload, phase: str, gpu: Gpu) -> float:
    """Return the seconds in which a phase waits for copies of offloaded tensors."""
    return work.host_bytes.get(phase, 0.0) / (gpu.host * _REACHED)


def _seconds_of_expert_bytes(runs: Sequence[TimedRun]) -> float:
    """Return what experts take beyond their operations: GPU-seconds for as many bytes of rows as the GPU's memory
    delivers in a second; 0 if no run has experts.
    """
    return _rate_of_remainder(
        runs, lambda run: {phase: size / run.gpu.bandwidth for phase, size in run.workload.expert_bytes.items()}
    )


def _seconds_of_pairs(runs: Sequence[TimedRun]) -> float:
    """Return what attention takes beyond the rate of other operations: GPU-seconds for as many of its operations as the
    GPU has in a second by its data sheet; 0 if no run has long sequences.
    """

    def sizes(run: TimedRun) -> dict[str, float]:
        is_seen = run.workload.is_long and not run.workload.has_experts
        return {phase: size / run.gpu.peak_flops for phase, size in run.workload.pairs.items() if is_seen}

    return _rate_of_remainder(runs, sizes)


def _rate_of_remainder(runs: Sequence[TimedRun], sizes: Callable[[TimedRun], Mapping[str, float]]) -> float:
    """Return the GPU-seconds that phases took beyond their operations, for each unit of `sizes`; at least 0."""
    remaining = total = 0.0
    for run in runs:
        for phase, size in sizes(run).items():
            cost = _of_operations(run.workload, phase, run.gpu, runs)
            if cost is not None and phase in run.seconds:
                fixed, divided = cost
                seconds = run.seconds[phase] - fixed - _of_copies(run.workload, phase, run.gpu)
                remaining += seconds * run.workload.gpus[phase] - divided
                total += size
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
