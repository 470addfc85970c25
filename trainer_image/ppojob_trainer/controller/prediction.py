"""Predicts the step time on another layout from the metrics of steps on one layout. Pure.

Called by `recommendation` and the benchmark. `cost_model` predicts the phases, `step_time` the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ppojob_trainer.controller.cost_model import Observation, PhaseCost
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.controller.step_time import Layout, StepTime, is_of_step, step_time

__all__ = ["evenness", "observations", "predict"]

_TIMING = "timing_s/"
_PAUSED = "rollout/paused_s"
_TOKENS = "perf/total_num_tokens"
_MEAN, _LONGEST = "response_length/mean", "response_length/max"


def observations(steps: Iterable[Mapping[str, float]], layout: Layout) -> dict[str, list[Observation]]:
    """Return the observations of each phase from steps on a layout.

    Args:
        steps: metrics of each step, with `timing_s/<phase>`. Without `perf/total_num_tokens` all batches count as
            equal; without `response_length/*` all responses of a batch do.
    """
    found: dict[str, list[Observation]] = {}
    for metrics in steps:
        for name, seconds in metrics.items():
            phase = name.removeprefix(_TIMING)
            if phase != name and is_of_step(phase):
                # `step_time` adds the pauses of the engines again.
                paused = metrics.get(_PAUSED, 0.0) if phase == Phase.GENERATE else 0.0
                taken = max(0.0, seconds - paused)
                seen = Observation(layout.gpus_of(phase), taken, metrics.get(_TOKENS, 1.0), evenness(metrics))
                found.setdefault(phase, []).append(seen)
    return found


def evenness(metrics: Mapping[str, float]) -> float:
    """Return a step's mean response length / its longest response length; 1 if unknown."""
    longest = metrics.get(_LONGEST, 0.0)
    return metrics[_MEAN] / longest if longest else 1.0


def predict(costs: Mapping[str, PhaseCost], layout: Layout) -> StepTime:
    """Return the predicted step time on a layout."""
    return step_time({phase: cost.seconds(layout.gpus_of(phase)) for phase, cost in costs.items()}, layout)
