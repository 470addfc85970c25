"""Predicts how long each phase takes on another number of GPUs, from measured phases. Pure; called by `recommendation`
and the benchmark, which combine the phases into a step with `step_time`.

A phase that is divided over GPUs takes `fixed + work x tokens / GPUs`. If the tokens per GPU differed enough (runs on
several layouts, or batches of different lengths), both parts are fitted by least squares. From one layout and one batch
size they cannot be separated, and the fixed part is *assumed*: a share of the time on one GPU, by Amdahl's law (1967),
the same for every model. `is_assumed` says which case it was.

Generation differs: longer responses take more steps of the engine, each with its latency, so only another number of
GPUs separates the two parts. The fixed part is the time of the longest response, however short the others are; the
divided part is the work of all responses.

The measured time of a phase that several pools compute (`ref`) lasts while any of them does, so it is an upper bound.

The model leaves out networks (the gathers of a pool that is newly spread over several nodes), memory (fewer tokens per
pass), the sleep and wake-up of engines that share a GPU, and the passes in which pipeline stages wait for one another:
with more GPUs, a rank has fewer micro-batches, so the share of these passes grows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ppojob_trainer.controller.phases import Phase

__all__ = ["Observation", "PhaseCost", "fit", "fit_phase"]

FIXED_SHARE: Final[Mapping[str, float]] = {
    # A decoding step reads all weights and launches all kernels, however few sequences the replica has. This value is
    # for responses of equal length.
    Phase.GENERATE: 0.5,
    # Kernel launches, gathers, the uneven last micro-batch.
    Phase.OLD_LOG_PROB: 0.1,
    Phase.REF: 0.1,
    Phase.VALUES: 0.1,
    Phase.REWARD_MODEL: 0.1,
    Phase.UPDATE_ACTOR: 0.1,
    Phase.UPDATE_CRITIC: 0.1,
}
"""Assumed fixed share of a phase's time on one GPU. Phases that are not listed (the weights, which every replica gets
whole; advantages, which are a few sums; the users' workers) are not divided over GPUs, and nothing is fitted to them:
a line through their noise would suggest that they are."""

MIN_SPREAD: Final = 1.5
"""Smallest ratio of the most to the fewest tokens per GPU at which both parts are fitted."""


@dataclass(frozen=True)
class Observation:
    """One measurement of a phase: its seconds, on how many GPUs, for a batch of how many tokens.

    evenness: mean response length / longest response length.
    """

    gpus: int
    seconds: float
    tokens: float = 1.0
    evenness: float = 1.0


@dataclass(frozen=True)
class PhaseCost:
    """The cost of a phase for the median batch: fixed seconds, and GPU-seconds that are divided by the GPUs.

    is_assumed: the observations could not separate the two parts.
    """

    fixed_s: float
    divided_gpu_s: float
    is_assumed: bool

    def seconds(self, gpus: int) -> float:
        """Return the seconds on this number of GPUs."""
        return self.fixed_s + self.divided_gpu_s / gpus


def fit(observations: Mapping[str, Sequence[Observation]]) -> dict[str, PhaseCost]:
    """Return the cost of each phase that has observations."""
    return {phase: fit_phase(phase, seen) for phase, seen in observations.items() if seen}


def fit_phase(phase: str, observations: Sequence[Observation]) -> PhaseCost:
    """Return the cost of one phase from at least one observation."""
    tokens = statistics.median(seen.tokens for seen in observations)
    share = FIXED_SHARE.get(phase, 1.0)
    if phase == Phase.GENERATE:
        share /= share + (1 - share) * statistics.median(seen.evenness for seen in observations)
        observations = [Observation(seen.gpus, seen.seconds, tokens) for seen in observations]
    loads = [seen.tokens / seen.gpus for seen in observations]
    seconds = [seen.seconds for seen in observations]
    if phase not in FIXED_SHARE or max(loads) < MIN_SPREAD * min(loads):
        gpus = statistics.median(seen.gpus for seen in observations)
        return _assumed(share, statistics.median(seconds), gpus)
    fixed, slope = _line(loads, seconds)
    return PhaseCost(fixed, slope * tokens, is_assumed=False)


def _assumed(share: float, seconds: float, gpus: float) -> PhaseCost:
    on_one_gpu = seconds / (share + (1 - share) / gpus)
    return PhaseCost(share * on_one_gpu, (1 - share) * on_one_gpu, is_assumed=True)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of the least-squares line; neither is negative."""
    slope, intercept = statistics.linear_regression(x, y)
    if slope < 0:
        return statistics.fmean(y), 0.0
    if intercept < 0:
        return 0.0, statistics.linear_regression(x, y, proportional=True).slope
    return intercept, slope
