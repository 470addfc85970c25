"""The picture of one run, or of several side by side: reward, KL, response length, time per phase, busy pools.

`ppojob plot` and the run itself call it. It reads metrics.jsonl only, draws what is there, and says which panel has no
data. It uses matplotlib without a display and without `pyplot`, whose state is not safe in a thread.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ppojob_trainer.telemetry.records import read_metrics

Series = npt.NDArray[np.float64]
"""[num_points]"""

_REWARD, _VALIDATION = "critic/score/mean", "val-core/score/mean"
_KL = (("actor/ppo_kl", "to the policy that generated"), ("actor/reward_kl_penalty", "to the reference"))
_TIMING = re.compile(r"timing_s/(?P<phase>[^/]+)")
_BUSY = re.compile(r"pool/(?P<pool>[^/]+)/busy_fraction")
_WHOLE, _WHOLE_LABEL = "step", "whole step"
_PHASE_COLORS = {
    "data": "#d8b365", "gen": "#4269d0", "reward": "#efb118", "old_log_prob": "#ff725c", "ref": "#6cc5b0",
    "values": "#3ca951", "adv": "#ff8ab7", "update_critic": "#a463f2", "update_actor": "#97bbf5",
    "update_weights": "#9c6b4e", "save_checkpoint": "#9498a0", "testing": "#c9c9c9",
}  # fmt: skip
_OTHER_COLORS = ("#2f4b7c", "#7a5195", "#bc5090", "#5c8001")
_RUN_COLORS = ("#1f5fbf", "#d1495b", "#2a9d5c", "#b07aa1", "#e39f2d", "#5b5f66")
_SMOOTHED_FROM = 60
_MAX_BARS = 60
_LINE_STYLES = ("-", "--", ":", "-.")
_STYLE: dict[Any, Any] = {
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

    def get(self, metric: str) -> tuple[Series, Series] | None:
        """Return steps and values of a metric that has any."""
        return self.series.get(metric)


def plot(paths: Sequence[Path], output: Path) -> Path:
    """Draw the runs whose metrics.jsonl (or folder with one) are given into the PNG `output`; returns `output`.

    Raises:
        FileNotFoundError: a file does not exist.
        MetricsUnreadableError: a file holds something else than records.
        ValueError: no path was given, or a file has no record yet.
    """
    if not paths:
        raise ValueError("no metrics file was given: name at least one")
    runs = [_load(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    with mpl.rc_context(_STYLE):
        figure = _draw(runs)
        output.parent.mkdir(parents=True, exist_ok=True)
        aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
        figure.savefig(aside, format="png")
    aside.replace(output)
    return output


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
    return Run(name, series)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the folder's, or as much of the path as tells the runs apart."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in paths]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _draw(runs: Sequence[Run]) -> Figure:
    """Lay the panels out: lines above, seconds per phase below, one panel per run; busy pools beside or under them."""
    is_single = len(runs) == 1
    width = 12.5 if len(runs) <= 2 else min(5.4 * len(runs), 26.0)
    heights = [3.6, 3.8] if is_single else [3.6, 3.6, 2.9]
    figure = Figure(figsize=(width, sum(heights) + 0.5), dpi=110, layout="constrained")
    figure.suptitle(runs[0].name if is_single else " ", fontsize=13 if is_single else 22, x=0.012, ha="left")
    if not is_single:
        lines = [Line2D([], [], color=color, linewidth=3) for color in _colors(runs)]
        figure.legend(lines, [run.name for run in runs], loc="upper left", ncols=len(runs), fontsize=11)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    rows = [figure.add_subfigure(grid[index]) for index in range(len(heights))]
    for axes, draw in zip(rows[0].subplots(1, 3), (_reward, _kl, _lengths), strict=True):
        draw(axes, runs)
    if is_single:
        timing, busy = rows[1].subplots(1, 2, width_ratios=[2.2, 1])
        _timings([timing], runs)
    else:
        busy = rows[2].subplots()
        _timings(list(rows[1].subplots(1, len(runs))), runs)
    _busy(busy, runs)
    return figure


def _reward(axes: Axes, runs: Sequence[Run]) -> None:
    _frame(axes, "Reward", "mean score")
    for run, color in zip(runs, _colors(runs), strict=True):
        _line(axes, run.get(_REWARD), color, "training")
        if (validation := run.get(_VALIDATION)) is not None:
            (line,) = axes.plot(*validation, "--o", color=color, label="validation")
            line.set(markersize=4.5, linewidth=1.1)
    _finish(axes, runs)


def _kl(axes: Axes, runs: Sequence[Run]) -> None:
    _frame(axes, "KL divergence", "nats per token")
    for run, color in zip(runs, _colors(runs), strict=True):
        for (metric, label), style in zip(_KL, ("-", ":"), strict=True):
            _line(axes, run.get(metric), color, label, style=style)
    _finish(axes, runs)


def _lengths(axes: Axes, runs: Sequence[Run]) -> None:
    _frame(axes, "Response length", "tokens, mean of the step")
    for run, color in zip(runs, _colors(runs), strict=True):
        _line(axes, run.get("response_length/mean"), color, "mean")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    _finish(axes, runs)


def _timings(panels: Sequence[Axes], runs: Sequence[Run]) -> None:
    """Stack the seconds of the phases, one panel per run; phases that overlap stack higher than the step is long."""
    phases = _phases(runs)
    highest = 0.0
    for axes, run in zip(panels, runs, strict=True):
        _frame(axes, "Time per phase" if len(runs) == 1 else f"Time per phase: {run.name}", "seconds per step")
        highest = max(highest, _stack(axes, run, phases))
    for axes in panels:
        axes.set_ylim(0, highest * 1.06 or 1.0)
        if not axes.has_data():
            _say_no_data(axes)
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        # In the order of the stack: what is on top of the bars is on top of the legend.
        shown = [name for name in (*(_words(phase) for phase in reversed(phases)), _WHOLE_LABEL) if name in handles]
        panels[-1].legend([handles[name] for name in shown], shown, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _stack(axes: Axes, run: Run, phases: Sequence[str]) -> float:
    """Draw the bars of one run, several steps a bar in a long run. Returns the height that is needed."""
    known = [points[0] for phase in (*phases, _WHOLE) if (points := run.get(f"timing_s/{phase}")) is not None]
    steps = np.unique(np.concatenate(known)) if known else np.empty(0)
    if not len(steps):
        return 0.0
    group = -(-len(steps) // _MAX_BARS)
    bars = [steps[start : start + group] for start in range(0, len(steps), group)]
    centers, widths = np.array([part.mean() for part in bars]), np.array([part[-1] - part[0] + 1 for part in bars])
    bottom = np.zeros(len(bars))
    gap = 0.86 if len(bars) <= 20 else 1.0
    for phase, color in zip(phases, _phase_colors(phases), strict=True):
        heights = _mean_within(run.get(f"timing_s/{phase}"), bars)
        if heights.any():
            axes.bar(centers, heights, widths * gap, bottom, color=color, label=_words(phase), linewidth=0)
        bottom += heights
    whole = _mean_within(run.get(f"timing_s/{_WHOLE}"), bars)
    if whole.any():
        marker = "." if len(bars) <= 20 else None
        axes.plot(centers, whole, color="#202020", linewidth=1.2, marker=marker, label=_WHOLE_LABEL)
    return float(max(bottom.max(), whole.max()))


def _mean_within(points: tuple[Series, Series] | None, bars: Sequence[Series]) -> Series:
    """Return the mean over the steps of each bar; a phase that a step did not have counts 0 there."""
    if points is None:
        return np.zeros(len(bars))
    steps, values = points
    return np.array([values[(steps >= part[0]) & (steps <= part[-1])].sum() / len(part) for part in bars])


def _phases(runs: Sequence[Run]) -> list[str]:
    """Return the phases of all runs: the known ones in the order of a step, then the others, longest first."""
    totals: dict[str, float] = {}
    for run in runs:
        for metric, (_, values) in run.series.items():
            match = _TIMING.fullmatch(metric)
            if match and match["phase"] != _WHOLE:
                totals[match["phase"]] = totals.get(match["phase"], 0.0) + float(values.sum())
    known = [phase for phase in _PHASE_COLORS if phase in totals]
    others = sorted(set(totals) - set(known), key=lambda phase: -totals[phase])
    return [*known, *others[: len(_OTHER_COLORS)]]


def _phase_colors(phases: Sequence[str]) -> list[str]:
    """Return a color for each phase; a known phase has the same one in every picture."""
    others = iter(_OTHER_COLORS)
    return [_PHASE_COLORS.get(phase) or next(others) for phase in phases]


def _busy(axes: Axes, runs: Sequence[Run]) -> None:
    _frame(axes, "Busy pools", "percent of the step")
    pools = list(dict.fromkeys(match["pool"] for run in runs for m in run.series if (match := _BUSY.fullmatch(m))))
    for run, color in zip(runs, _colors(runs), strict=True):
        for index, pool in enumerate(pools):
            points = run.get(f"pool/{pool}/busy_fraction")
            if points is not None:
                shade = _RUN_COLORS[index % len(_RUN_COLORS)] if len(runs) == 1 else color
                _line(axes, (points[0], points[1] * 100), shade, pool, style=_LINE_STYLES[index % 4])
    axes.set_ylim(0, 105)
    _finish(axes, runs)


def _line(axes: Axes, points: tuple[Series, Series] | None, color: str, label: str, *, style: str = "-") -> None:
    """Draw a series; a long one as its moving average over a pale line."""
    if points is None:
        return
    steps, values = points
    if len(steps) < _SMOOTHED_FROM:
        axes.plot(steps, values, style, color=color, label=label, marker="." if len(steps) < 20 else None)
        return
    window = np.ones(max(len(values) // 40, 5))
    # At both ends the average is over what there is.
    mean = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
    axes.plot(steps, mean, style, color=color, label=label)


def _frame(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))


def _finish(axes: Axes, runs: Sequence[Run]) -> None:
    """Add what the lines mean, once for each kind of line; the colors of several runs are named above the panels."""
    if not axes.has_data():
        _say_no_data(axes)
        return
    kinds = {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(runs) > 1:
        kinds = {label: _in_grey(line) for label, line in kinds.items()}
    if len(kinds) > 1:
        axes.legend(list(kinds.values()), list(kinds), loc="best")


def _in_grey(line: Artist) -> Line2D:
    if not isinstance(line, Line2D):
        raise TypeError(f"a legend of lines has a {type(line).__name__}")
    copy = Line2D([], [], color="#606060")
    copy.set_linestyle(line.get_linestyle())
    copy.set_marker(line.get_marker())
    return copy


def _say_no_data(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#909090")
    axes.set_xticks([])
    axes.set_yticks([])


def _words(phase: str) -> str:
    return phase.replace("_", " ")


def _colors(runs: Sequence[Run]) -> list[str]:
    return [_RUN_COLORS[index % len(_RUN_COLORS)] for index in range(len(runs))]
