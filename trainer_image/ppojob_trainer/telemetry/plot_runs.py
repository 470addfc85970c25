"""What the pictures have in common: runs and groups of runs, names, colors, style. It draws nothing.

The colors stay apart for people who do not see all of them: of runs by Okabe and Ito (2008), of phases by Paul Tol's
muted scheme. A phase has the same one in every picture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from ppojob_trainer.telemetry.records import read_metrics

Series = npt.NDArray[np.float64]
"""[num_points]"""

TIMING = re.compile(r"timing_s/(?P<phase>[^/]+)")
BUSY = re.compile(r"pool/(?P<pool>[^/]+)/busy_fraction")
WHOLE_STEP: Final = "step"
RUN_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_PHASE_COLORS = {
    "data": "#b5a27a", "gen": "#332288", "reward": "#ddcc77", "reward_model": "#999933", "old_log_prob": "#cc6677",
    "ref": "#44aa99", "values": "#117733", "adv": "#aa4499", "update_critic": "#882255", "update_actor": "#88ccee",
    "update_weights": "#e69f00", "save_checkpoint": "#777777", "testing": "#c9c9c9",
}  # fmt: skip
_OTHER_COLORS = ("#2f4b7c", "#d45087", "#665191", "#5c8001")
STYLE: Final[dict[Any, Any]] = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7, "axes.axisbelow": True, "axes.edgecolor": "#808080", "axes.titlesize": 11,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelsize": 9.5, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "legend.fontsize": 8.5, "legend.frameon": False, "lines.linewidth": 1.7,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The metrics of one run, by name; each has the steps where it was written, and its values."""

    name: str
    series: Mapping[str, tuple[Series, Series]]
    folder: Path = Path()

    def get(self, metric: str) -> tuple[Series, Series] | None:
        """Return steps and values of a metric that has any."""
        return self.series.get(metric)


@dataclass(frozen=True)
class Band:
    """A metric of several runs at the steps that all of them have: [num_points] each."""

    steps: Series
    mean: Series
    low: Series
    """The lowest of the runs."""
    high: Series


@dataclass(frozen=True)
class Group:
    """Runs of the same name, such as one for each seed. They are drawn as one line, with a band around it."""

    name: str
    runs: tuple[Run, ...]

    def get(self, metric: str, smooth: Callable[[Series], Series] = lambda values: values) -> Band | None:
        """Return a metric that any of the runs has; each run's values are smoothed first."""
        found = [points for run in self.runs if (points := run.get(metric)) is not None]
        if not found:
            return None
        steps = found[0][0]
        for others, _ in found[1:]:
            steps = np.intersect1d(steps, others)
        rows = np.stack([smooth(values)[np.isin(numbers, steps)] for numbers, values in found])
        return Band(steps, rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0))


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Return the runs by their names, in the order in which those are met."""
    names = dict.fromkeys(run.name for run in runs)
    return [Group(name, tuple(run for run in runs if run.name == name)) for name in names]


def load_runs(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Run]:
    """Return the runs whose metrics.jsonl (or folder with one) are given, each with its label or a unique name.

    Raises:
        FileNotFoundError: a file does not exist.
        MetricsUnreadableError: a file holds something else than records.
        ValueError: no path was given, a file has no record yet, or there are labels for another number of runs.
    """
    if not paths:
        raise ValueError("no metrics file was given: name at least one")
    if labels and len(labels) != len(paths):
        raise ValueError(f"{len(labels)} labels for {len(paths)} runs: give one for each, in the same order")
    return [_load(path, name) for path, name in zip(paths, labels or names_of(paths), strict=True)]


def _load(path: Path, name: str) -> Run:
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: name a metrics.jsonl, or the folder of a run")
    records = read_metrics(file)
    if not records:
        raise ValueError(f"{file} has no record yet: wait for the first step")
    metrics = dict.fromkeys(metric for record in records for metric in record)
    series = {}
    for metric in metrics:
        points = [(record["step"], value) for record in records if (value := record.get(metric)) is not None]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            series[metric] = (steps, values)
    return Run(name, series, file.parent)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the folder's, or as much of the path as distinguishes the runs."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in paths]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def phases_of(runs: Sequence[Run]) -> list[str]:
    """Return the phases of all runs: the known ones in the order of a step, then the others, longest first."""
    totals: dict[str, float] = {}
    for run in runs:
        for metric, (_, values) in run.series.items():
            match = TIMING.fullmatch(metric)
            if match and match["phase"] != WHOLE_STEP:
                totals[match["phase"]] = totals.get(match["phase"], 0.0) + float(values.sum())
    known = [phase for phase in _PHASE_COLORS if phase in totals]
    others = sorted(set(totals) - set(known), key=lambda phase: -totals[phase])
    return [*known, *others[: len(_OTHER_COLORS)]]


def phase_colors(phases: Sequence[str]) -> dict[str, str]:
    """Return a color for each of at most four unknown phases and any number of known ones."""
    others = iter(_OTHER_COLORS)
    return {phase: _PHASE_COLORS.get(phase) or next(others) for phase in phases}


def pools_of(runs: Sequence[Run]) -> list[str]:
    """Return the pools of all runs, in the order in which they are met."""
    return list(dict.fromkeys(match["pool"] for run in runs for m in run.series if (match := BUSY.fullmatch(m))))


def save(figure: Figure, output: Path) -> Path:
    """Write the PNG; who reads it meanwhile sees the one before. Returns `output`."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    figure.savefig(aside, format="png")
    aside.replace(output)
    return output


def in_words(phase: str) -> str:
    """Return a phase's name for people."""
    return phase.replace("_", " ")
