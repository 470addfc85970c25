"""The picture of one run, or of several: reward, KL, response length, gap to the engine, busy pools, time per phase.

`ppojob plot` and the run itself call it. It reads metrics.jsonl only. Runs of the same name (of several seeds, say) are
drawn as their mean with a band from the lowest to the highest. A single run has all panels, and those without data say
so; a comparison leaves them out. It uses matplotlib without a display and without `pyplot`, which is not
safe in a thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ppojob_trainer.telemetry.plot_runs import (
    RUN_COLORS,
    STYLE,
    WHOLE_STEP,
    Group,
    Run,
    Series,
    groups_of,
    in_words,
    load_runs,
    phase_colors,
    phases_of,
    pools_of,
    save,
)

_WHOLE_LABEL = "whole step"
_SMOOTHED_FROM = 60
_MAX_BARS = 60
_LINE_STYLES = ("-", "--", ":", "-.")
_ACROSS = 3
_LIMIT_COLOR = "#c0392b"
_HEALTHY_GAP = 0.02
"""Above it docs/watching-a-run.md and the chart's alert ask for the cause."""


@dataclass(frozen=True)
class Curve:
    """A metric in a panel."""

    metric: str
    label: str
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """Curves in the same unit, on one pair of axes."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    begins_at_zero: bool = False
    limit: float | None = None
    """Where a line is drawn, above which the values are bad."""

    def has_data(self, groups: Sequence[Group]) -> bool:
        """Return whether any run has any of its metrics."""
        return any(group.get(curve.metric) is not None for group in groups for curve in self.curves)


_VALIDATION = Curve("val-core/score/mean", "validation", "--o")
_PANELS = (
    Panel("Reward", "mean score", (Curve("critic/score/mean", "training"), _VALIDATION)),
    # A job has it in the reward, in the loss, in both, or in neither.
    Panel(
        "KL to the reference", "nats per token",
        (Curve("actor/reward_kl_penalty", "in the reward"), Curve("actor/kl_loss", "in the loss", "--")),
    ),
    Panel("KL of an update", "nats per token", (Curve("actor/ppo_kl", "to the policy that generated"),)),
    Panel("Response length", "tokens, mean of the step", (Curve("response_length/mean", "mean"),), begins_at_zero=True),
    Panel(
        "Gap between trainer and engine", "difference of probabilities",
        (Curve("training/rollout_probs_diff_mean", "mean"),), begins_at_zero=True, limit=_HEALTHY_GAP,
    ),
)  # fmt: skip


def plot(paths: Sequence[Path], output: Path, labels: Sequence[str] = ()) -> Path:
    """Draw the runs whose metrics.jsonl (or folder with one) are given into the PNG `output`; returns `output`.

    Args:
        labels: of the runs, in their order; those with the same label are drawn as one. Empty: the names of their
            folders.

    Raises:
        FileNotFoundError: a file does not exist.
        MetricsUnreadableError: a file holds something else than records.
        ValueError: no path was given, or a file has no record yet.
    """
    groups = groups_of(load_runs(paths, labels))
    with mpl.rc_context(STYLE):
        return save(_draw(groups), output)


def _draw(groups: Sequence[Group]) -> Figure:
    """Lay the panels out: curves and busy pools three in a row, then seconds per phase, one panel for each group."""
    is_single = len(groups) == 1
    runs = [run for group in groups for run in group.runs]
    drawn: list[Callable[[Axes], None]] = [
        lambda axes, panel=panel: _curves(axes, panel, groups)  # type: ignore[misc]
        for panel in _PANELS
        if is_single or panel.has_data(groups)
    ]
    if is_single or pools_of(runs):
        drawn.append(lambda axes: _busy(axes, groups))
    has_timings = is_single or bool(phases_of(runs))
    num_rows = -(-len(drawn) // _ACROSS)
    heights = [3.5] * num_rows + ([3.8] if has_timings else [])
    width = 13.5 if len(groups) <= 3 else min(4.8 * len(groups), 26.0)
    figure = Figure(figsize=(width, sum(heights) + 0.5), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.12))
    figure.suptitle(_title(groups[0]) if is_single else " ", fontsize=13 if is_single else 22, x=0.012, ha="left")
    if not is_single:
        lines = [Line2D([], [], color=color, linewidth=3) for _, color in _colored(groups)]
        figure.legend(lines, [_title(group) for group in groups], loc="upper left", ncols=len(groups), fontsize=11)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    for row in range(num_rows):
        part = figure.add_subfigure(grid[row])
        columns = min(len(drawn), _ACROSS)
        for axes, draw in zip(part.subplots(1, columns, squeeze=False)[0], drawn[row * _ACROSS :], strict=False):
            draw(axes)
        for axes in part.axes[len(drawn) - row * _ACROSS :]:
            axes.set_visible(False)
    if has_timings:
        _timings(list(figure.add_subfigure(grid[num_rows]).subplots(1, len(groups), squeeze=False)[0]), groups)
    return figure


def _title(group: Group) -> str:
    return group.name if len(group.runs) == 1 else f"{group.name}: mean and range of {len(group.runs)} runs"


def _curves(axes: Axes, panel: Panel, groups: Sequence[Group]) -> None:
    _frame(axes, panel.title, panel.unit)
    for group, color in _colored(groups):
        for curve in panel.curves:
            _line(axes, group, curve, color)
    if panel.limit is not None and axes.has_data():
        axes.axhline(panel.limit, color=_LIMIT_COLOR, linewidth=0.9, linestyle="--")
        place, right = (1.0, panel.limit), axes.get_yaxis_transform()
        axes.text(
            *place, f"limit {panel.limit:g}", transform=right, color=_LIMIT_COLOR, fontsize=8, ha="right", va="bottom"
        )
    if panel.begins_at_zero:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    _finish(axes, groups)


def _timings(panels: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Stack the seconds of the phases, one panel per group; phases that overlap stack higher than the step is long."""
    phases = phases_of([run for group in groups for run in group.runs])
    highest = 0.0
    for axes, group in zip(panels, groups, strict=True):
        _frame(axes, "Time per phase" if len(groups) == 1 else f"Time per phase: {group.name}", "seconds per step")
        highest = max(highest, _stack(axes, group, phases))
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


def _stack(axes: Axes, group: Group, phases: Sequence[str]) -> float:
    """Draw the bars of one group, several steps a bar in a long run. Returns the height that is needed."""
    timed = [run.get(f"timing_s/{phase}") for run in group.runs for phase in (*phases, WHOLE_STEP)]
    known = [points[0] for points in timed if points is not None]
    steps = np.unique(np.concatenate(known)) if known else np.empty(0)
    if not len(steps):
        return 0.0
    size = -(-len(steps) // _MAX_BARS)
    bars = [steps[start : start + size] for start in range(0, len(steps), size)]
    centers, widths = np.array([part.mean() for part in bars]), np.array([part[-1] - part[0] + 1 for part in bars])
    bottom = np.zeros(len(bars))
    gap = 0.86 if len(bars) <= 20 else 1.0
    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5} if len(bars) <= 20 else {"linewidth": 0}
    for phase, color in phase_colors(phases).items():
        heights = _mean_of_runs(group.runs, f"timing_s/{phase}", bars)
        if heights.any():
            axes.bar(centers, heights, widths * gap, bottom, color=color, label=in_words(phase), **edge)
        bottom += heights
    whole = _mean_of_runs(group.runs, f"timing_s/{WHOLE_STEP}", bars)
    if whole.any():
        marker = "." if len(bars) <= 20 else None
        axes.plot(centers, whole, color="#202020", linewidth=1.2, marker=marker, label=_WHOLE_LABEL)
    return float(max(bottom.max(), whole.max()))


def _mean_of_runs(runs: Sequence[Run], metric: str, bars: Sequence[Series]) -> Series:
    """Return the mean over the runs of each bar's mean; a run that ended before a bar does not count there."""
    last = [max((points[0][-1] for points in run.series.values()), default=0.0) for run in runs]
    counts = np.array([[end >= part[0] for part in bars] for end in last], dtype=np.float64)
    rows = np.stack([_mean_within(run.get(metric), bars) for run in runs])
    return np.asarray((rows * counts).sum(axis=0) / np.maximum(counts.sum(axis=0), 1.0))


def _mean_within(points: tuple[Series, Series] | None, bars: Sequence[Series]) -> Series:
    """Return the mean over the steps of each bar; a phase that a step did not have counts 0 there."""
    if points is None:
        return np.zeros(len(bars))
    steps, values = points
    return np.array([values[(steps >= part[0]) & (steps <= part[-1])].sum() / len(part) for part in bars])


def _busy(axes: Axes, groups: Sequence[Group]) -> None:
    _frame(axes, "Busy pools", "percent of the step")
    pools = pools_of([run for group in groups for run in group.runs])
    for group, color in _colored(groups):
        for index, pool in enumerate(pools):
            curve = Curve(f"pool/{pool}/busy_fraction", pool, _LINE_STYLES[index % 4])
            _line(axes, group, curve, RUN_COLORS[index % len(RUN_COLORS)] if len(groups) == 1 else color, scale=100)
    axes.set_ylim(0, 105)
    _finish(axes, groups)


def _line(axes: Axes, group: Group, curve: Curve, color: str, *, scale: float = 1.0) -> None:
    """Draw a metric: a long one as its moving average, over a pale line where it is of one run alone."""
    raw = group.get(curve.metric)
    if raw is None:
        return
    is_long, is_marked = len(raw.steps) >= _SMOOTHED_FROM, curve.style.endswith("o")
    band = (group.get(curve.metric, _moving_average) if is_long else raw) or raw
    if len(group.runs) > 1:
        axes.fill_between(band.steps, band.low * scale, band.high * scale, color=color, alpha=0.18, linewidth=0)
    elif is_long:
        axes.plot(raw.steps, raw.mean * scale, color=color, alpha=0.2, linewidth=0.8)
    (line,) = axes.plot(band.steps, band.mean * scale, curve.style, color=color, label=curve.label)
    if is_marked:
        line.set(markersize=4.0, linewidth=1.2)
    elif len(band.steps) < 20:
        line.set_marker(".")


def _moving_average(values: Series) -> Series:
    """Return the mean of a fortieth of the values around each; at both ends of what there is."""
    window = np.ones(max(len(values) // 40, 5))
    return np.asarray(np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same"))


def _frame(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))


def _finish(axes: Axes, groups: Sequence[Group]) -> None:
    """Add what the lines mean, once for each kind of line; the colors of several groups are named above the panels."""
    if not axes.has_data():
        _say_no_data(axes)
        return
    kinds = {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(groups) > 1:
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


def _colored(groups: Sequence[Group]) -> Iterator[tuple[Group, str]]:
    """Yield each group with its color."""
    for index, group in enumerate(groups):
        yield group, RUN_COLORS[index % len(RUN_COLORS)]
