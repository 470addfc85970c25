"""The picture of one run, or of several side by side: reward, KL, response length, time per phase, busy pools.

`ppojob plot` and the run itself call it. It reads metrics.jsonl only, draws what is there, and says which panel has no
data. It uses matplotlib without a display and without `pyplot`, whose state is not safe in a thread.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ppojob_trainer.telemetry.plot_runs import (
    RUN_COLORS,
    STYLE,
    WHOLE_STEP,
    Run,
    Series,
    in_words,
    load_runs,
    phase_colors,
    phases_of,
    pools_of,
    save,
)

_REWARD, _VALIDATION = "critic/score/mean", "val-core/score/mean"
_KL = (("actor/ppo_kl", "to the policy that generated"), ("actor/reward_kl_penalty", "to the reference"))
_WHOLE_LABEL = "whole step"
_SMOOTHED_FROM = 60
_MAX_BARS = 60
_LINE_STYLES = ("-", "--", ":", "-.")


def plot(paths: Sequence[Path], output: Path, labels: Sequence[str] = ()) -> Path:
    """Draw the runs whose metrics.jsonl (or folder with one) are given into the PNG `output`; returns `output`.

    Args:
        labels: of the runs, in their order; empty: the names of their folders.

    Raises:
        FileNotFoundError: a file does not exist.
        MetricsUnreadableError: a file holds something else than records.
        ValueError: no path was given, or a file has no record yet.
    """
    runs = load_runs(paths, labels)
    with mpl.rc_context(STYLE):
        return save(_draw(runs), output)


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
    for run, color, width in _pens(runs):
        _line(axes, run.get(_REWARD), color, "training", width=width)
        if (validation := run.get(_VALIDATION)) is not None:
            (line,) = axes.plot(*validation, "--o", color=color, label="validation")
            line.set(markersize=4.5, linewidth=width * 0.7)
    _finish(axes, runs)


def _kl(axes: Axes, runs: Sequence[Run]) -> None:
    _frame(axes, "KL divergence", "nats per token")
    for run, color, width in _pens(runs):
        for (metric, label), style in zip(_KL, ("-", ":"), strict=True):
            _line(axes, run.get(metric), color, label, style=style, width=width)
    _finish(axes, runs)


def _lengths(axes: Axes, runs: Sequence[Run]) -> None:
    _frame(axes, "Response length", "tokens, mean of the step")
    for run, color, width in _pens(runs):
        _line(axes, run.get("response_length/mean"), color, "mean", width=width)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    _finish(axes, runs)


def _timings(panels: Sequence[Axes], runs: Sequence[Run]) -> None:
    """Stack the seconds of the phases, one panel per run; phases that overlap stack higher than the step is long."""
    phases = phases_of(runs)
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
        shown = [name for name in (*(in_words(phase) for phase in reversed(phases)), _WHOLE_LABEL) if name in handles]
        panels[-1].legend([handles[name] for name in shown], shown, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _stack(axes: Axes, run: Run, phases: Sequence[str]) -> float:
    """Draw the bars of one run, several steps a bar in a long run. Returns the height that is needed."""
    known = [points[0] for phase in (*phases, WHOLE_STEP) if (points := run.get(f"timing_s/{phase}")) is not None]
    steps = np.unique(np.concatenate(known)) if known else np.empty(0)
    if not len(steps):
        return 0.0
    group = -(-len(steps) // _MAX_BARS)
    bars = [steps[start : start + group] for start in range(0, len(steps), group)]
    centers, widths = np.array([part.mean() for part in bars]), np.array([part[-1] - part[0] + 1 for part in bars])
    bottom = np.zeros(len(bars))
    gap = 0.86 if len(bars) <= 20 else 1.0
    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5} if len(bars) <= 20 else {"linewidth": 0}
    for phase, color in phase_colors(phases).items():
        heights = _mean_within(run.get(f"timing_s/{phase}"), bars)
        if heights.any():
            axes.bar(centers, heights, widths * gap, bottom, color=color, label=in_words(phase), **edge)
        bottom += heights
    whole = _mean_within(run.get(f"timing_s/{WHOLE_STEP}"), bars)
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


def _busy(axes: Axes, runs: Sequence[Run]) -> None:
    _frame(axes, "Busy pools", "percent of the step")
    pools = pools_of(runs)
    for run, color, width in _pens(runs):
        for index, pool in enumerate(pools):
            points = run.get(f"pool/{pool}/busy_fraction")
            if points is not None:
                shade = RUN_COLORS[index % len(RUN_COLORS)] if len(runs) == 1 else color
                style = _LINE_STYLES[index % 4]
                _line(axes, (points[0], points[1] * 100), shade, pool, style=style, width=width)
    axes.set_ylim(0, 105)
    _finish(axes, runs)


def _line(
    axes: Axes, points: tuple[Series, Series] | None, color: str, label: str, *, width: float, style: str = "-"
) -> None:
    """Draw a series; a long one as its moving average over a pale line."""
    if points is None:
        return
    steps, values = points
    if len(steps) < _SMOOTHED_FROM:
        marker = "." if len(steps) < 20 else None
        axes.plot(steps, values, style, color=color, label=label, marker=marker, linewidth=width)
        return
    window = np.ones(max(len(values) // 40, 5))
    # At both ends the average is over what there is.
    mean = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
    axes.plot(steps, mean, style, color=color, label=label, linewidth=width)


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


def _pens(runs: Sequence[Run]) -> Iterator[tuple[Run, str, float]]:
    """Yield each run with its color and its width: the first is the broadest, and shows where others lie upon it."""
    for index, (run, color) in enumerate(zip(runs, _colors(runs), strict=True)):
        yield run, color, 1.7 + 1.8 * min(len(runs) - 1 - index, 3)


def _colors(runs: Sequence[Run]) -> list[str]:
    return [RUN_COLORS[index % len(RUN_COLORS)] for index in range(len(runs))]
