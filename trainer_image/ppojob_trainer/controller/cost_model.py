"""How long each phase takes on another number of GPUs, fitted to what was measured. Pure; `recommendation` and the
benchmark call it, and put the step together from its answers by `step_time`.

A phase that more GPUs divide takes `fixed + work x tokens / GPUs`. The two parts can be told apart only where the
tokens for each GPU differed enough: in runs on several layouts, or with batches of different lengths. Then they are
fitted by least squares. From one layout and one batch size nobody can tell them apart, and the fixed part is *assumed*:
a share of the time on one GPU, by Amdahl's law (1967), the same for every model. `is_assumed` says which it was. For
generation longer responses tell nothing: they take more steps of the engine, each with its latency, so only another
number of GPUs does. Its fixed part is the longest response's, however short the others are; what is divided is all
responses'.

What the model does not know: networks (the gathers of a pool that is spread over nodes for the first time), memory
(fewer tokens to a pass), and sleeping and waking where roles share a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ppojob_trainer.controller.phases import Phase

__all__ = ["Observation", "PhaseCost", "fit", "fit_phase"]

FIXED_SHARE: Final[Mapping[str, float]] = {
    # A step of decoding reads all weights and starts all kernels, however few sequences the replica has. This is for
    # responses of the same length.
    Phase.GENERATE: 0.5,
    # Launches, gathers, the uneven last micro-batch.
    Phase.OLD_LOG_PROB: 0.1,
    Phase.REF: 0.1,
    Phase.VALUES: 0.1,
    Phase.REWARD_MODEL: 0.1,
    Phase.UPDATE_ACTOR: 0.1,
    Phase.UPDATE_CRITIC: 0.1,
}
"""Assumed share, on one GPU, of what more GPUs do not divide. Phases that are not named here (the weights, which every
replica gets whole; advantages, which are some sums; the users' own workers) are not divided at all, and nothing is
fitted to them: a line through their noise would say that they are."""

MIN_SPREAD: Final = 1.5
"""Ratio of the most tokens per GPU to the fewest from which on the two parts are fitted."""


@dataclass(frozen=True)
class Observation:
    """A phase as it was measured once: seconds on so many GPUs, for a batch of so many tokens.

    evenness: the mean length of the responses / the longest one's.
    """

    gpus: int
    seconds: float
    tokens: float = 1.0
    evenness: float = 1.0


@dataclass(frozen=True)
class PhaseCost:
    """What a phase costs for the median batch: seconds that stay, GPU-seconds that are divided by the GPUs.

    is_assumed: the observations could not tell one from the other.
    """

    fixed_s: float
    divided_gpu_s: float
    is_assumed: bool

    def seconds(self, gpus: int) -> float:
        """Return the seconds on so many GPUs."""
        return self.fixed_s + self.divided_gpu_s / gpus


def fit(observations: Mapping[str, Sequence[Observation]]) -> dict[str, PhaseCost]:
    """Return the cost of each phase that was observed at all."""
    return {phase: fit_phase(phase, seen) for phase, seen in observations.items() if seen}


def fit_phase(phase: str, observations: Sequence[Observation]) -> PhaseCost:
    """Return the cost of one phase from one observation or more."""
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
