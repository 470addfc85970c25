"""From the metrics of steps on one layout to the step on another one. Pure.

Called by `recommendation` and the benchmark. `cost_model` says what each phase takes there, `step_time` what the step
does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ppojob_trainer.controller.cost_model import Observation, PhaseCost
from ppojob_trainer.controller.step_time import Layout, StepTime, is_of_step, step_time

__all__ = ["evenness", "observations", "predict"]

_TIMING = "timing_s/"
_TOKENS = "perf/total_num_tokens"
_MEAN, _LONGEST = "response_length/mean", "response_length/max"


def observations(steps: Iterable[Mapping[str, float]], layout: Layout) -> dict[str, list[Observation]]:
    """Return what steps on a layout say of each phase.

    Args:
        steps: the metrics of each, with `timing_s/<phase>`; without `perf/total_num_tokens` all batches count as equal,
            without `response_length/*` the responses of a batch.
    """
    found: dict[str, list[Observation]] = {}
    for metrics in steps:
        for name, seconds in metrics.items():
            phase = name.removeprefix(_TIMING)
            if phase != name and is_of_step(phase):
                seen = Observation(layout.gpus_of(phase), seconds, metrics.get(_TOKENS, 1.0), evenness(metrics))
                found.setdefault(phase, []).append(seen)
    return found


def evenness(metrics: Mapping[str, float]) -> float:
    """Return the mean length of a step's responses / the longest one's; 1 where it is not known."""
    longest = metrics.get(_LONGEST, 0.0)
    return metrics[_MEAN] / longest if longest else 1.0


def predict(costs: Mapping[str, PhaseCost], layout: Layout) -> StepTime:
    """Return the step on a layout."""
    return step_time({phase: cost.seconds(layout.gpus_of(phase)) for phase, cost in costs.items()}, layout)
