"""The cost model against the measurements: what each layout's run predicts for every other one.

The phases of one run are all that a prediction knows. Called by `bench_split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ppojob_trainer.controller.cost_model import fit
from ppojob_trainer.controller.prediction import observations, predict
from tests.bench.measurement import Result


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step on layout `target`, as the run on layout `source` predicts it, and as it was."""

    source: str
    target: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Share of the measured time by which the prediction is too long."""
        return self.predicted_s / self.measured_s - 1


def predictions(results: Sequence[Result]) -> list[Prediction]:
    """Return all pairs of runs in which the source has every phase of the target; of a layout for itself too."""
    return [
        Prediction(source.name, target.name, _seconds(source, target), target.step_s)
        for source in results
        for target in results
        if set(target.phases()) <= set(source.phases())
    ]


def _seconds(source: Result, target: Result) -> float:
    return predict(fit(observations(source.steps, source.layout)), target.layout).seconds


def table(found: Sequence[Prediction]) -> Table:
    """Return the table of all pairs. A layout's prediction for itself tests the dataflow, the others the phases too."""
    shown = Table(title="cost model: seconds of a step")
    for column in ("predicted from", "for", "predicted", "measured", "error"):
        shown.add_column(column, justify="left" if column in ("predicted from", "for") else "right")
    for one in found:
        shown.add_row(one.source, one.target, f"{one.predicted_s:.3f}", f"{one.measured_s:.3f}", f"{one.error:+.1%}")
    return shown
