"""Where the time of a step goes, run beside run: seconds of each phase, and what each pool does when.

`ppojob plot --timing` calls it, to compare placements and schedules. The lanes are those of one real step, the median
one, from the trace beside metrics.jsonl; without a trace they are the busy share alone. All numbers are medians after
the first three steps, which compile and allocate; those of tests/bench and docs/measured.md are too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ppojob_trainer.telemetry.advice import read_advice
from ppojob_trainer.telemetry.plot_runs import (
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
from ppojob_trainer.telemetry.run_files import RunFiles
from ppojob_trainer.telemetry.trace import Span, read_trace

_NOT_OF_EACH_STEP = ("save_checkpoint", "testing", "load_checkpoint", "export")
_STEP_COLOR, _IDLE_COLOR, _BUSY_COLOR = "#404040", "#f0f0f0", "#7a9cc6"
_CPU = "CPU"
_LANE = 0.66
_WARM_UP_STEPS = 3
_SAME_TIME_S = 0.002
"""Clocks are read a moment after one phase and before the next; that is not an overlap."""
_ADVICE_WIDTH = 110
"""Letters of a line of the recommendation, below the lanes."""
_NAMED_FROM = 0.07
"""A phase shorter than this share of the width has no room for its name."""


@dataclass(frozen=True)
class Timing:
    """The median over the steps of one run, in seconds: of each phase, and of the whole step; and its median step."""

    run: Run
    phases: dict[str, float]
    step_seconds: float
    num_steps: int
    shown_step: int
    lanes: dict[str, list[Span]]
    """By pool; times count from the beginning of the step. Empty without a trace."""
    advice: str = ""
    """What the run's phases said about its layout, in lines."""


def plot_timing(paths: Sequence[Path], output: Path, labels: Sequence[str] = ()) -> Path:
    """Draw the runs whose metrics.jsonl (or folder with one) are given into the PNG `output`; returns `output`.

    Raises:
        FileNotFoundError: a file does not exist.
        MetricsUnreadableError: a file holds something else than records.
        ValueError: no path was given, or a file has no step yet.
    """
    timings = [_timing(run) for run in load_runs(paths, labels)]
    with mpl.rc_context(STYLE):
        return save(_draw(timings), output)


def _timing(run: Run) -> Timing:
    points = run.get(f"timing_s/{WHOLE_STEP}")
    if points is None:
        raise ValueError(f"{run.name} has no timing of a step yet: wait for its first step")
    steps, seconds = points
    steps, seconds = _measured(steps), _measured(seconds)
    medians = {}
    for phase in phases_of([run]):
        numbers, values = run.series[f"timing_s/{phase}"]
        if phase not in _NOT_OF_EACH_STEP:
            # A step without the phase (the actor's, in a warm-up of the critic) counts 0.
            found = values[np.isin(numbers, steps)]
            medians[phase] = float(np.median([*found, *[0.0] * (len(steps) - len(found))]))
    middle = int(np.argsort(seconds)[(len(seconds) - 1) // 2])
    shown = int(steps[middle])
    files = RunFiles(run.folder)
    lanes = _lanes(read_trace(files.trace), shown, float(seconds[middle]))
    advice = textwrap.fill(read_advice(files.recommendation), _ADVICE_WIDTH)
    return Timing(run, medians, float(np.median(seconds)), len(steps), shown, lanes, advice)


def _lanes(spans: Sequence[Span], step: int, seconds: float) -> dict[str, list[Span]]:
    """Return what ran within `seconds` from the beginning of the step, phases of its neighbors too."""
    # A step that was done again after a resume is in the trace twice; its data is asked for once more at a checkpoint.
    generations = [span.start for span in spans if (span.step, span.name) == (step, "gen")]
    if not generations:
        return {}
    prompts = [span.start for span in spans if (span.step, span.name) == (step, "data")]
    before = [begun for begun in prompts if max(generations) - seconds < begun <= max(generations)]
    start = max(before, default=max(generations))
    end = start + seconds
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        if span.end > start and span.start < end and span.name not in _NOT_OF_EACH_STEP:
            cut = (max(span.start, start) - start, min(span.end, end) - start)
            lanes.setdefault(span.pool or _CPU, []).append(Span(span.name, span.pool, span.role, span.step, *cut))
    return lanes


def _draw(timings: Sequence[Timing]) -> Figure:
    runs = [timing.run for timing in timings]
    phases = [phase for phase in phases_of(runs) if any(timing.phases.get(phase) for timing in timings)]
    colors = phase_colors(phases)
    lane_names = [_lane_names(timing) for timing in timings]
    heights = [
        0.62 * len(names) + 0.95 + 0.2 * len(timing.advice.splitlines())
        for names, timing in zip(lane_names, timings, strict=True)
    ]
    figure = Figure(figsize=(14, max(sum(heights) + 0.4, 5.0)), dpi=110, layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=[1.0 + 0.12 * len(runs), 2.1])
    left, right = figure.add_subfigure(grid[0, 0]), figure.add_subfigure(grid[0, 1])
    _bars(left.subplots(), timings, colors)
    panels = right.subplots(len(timings), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(_length(timing) for timing in timings)
    for axes, timing, names in zip(panels, timings, lane_names, strict=True):
        _draw_lanes(axes, timing, names, colors, longest)
        axes.set_xlabel(timing.advice, loc="left")
    below = "seconds from the beginning of the step"
    panels[-1].set_xlabel(f"{below}\n{timings[-1].advice}" if timings[-1].advice else below, loc="left")
    return figure


def _bars(axes: Axes, timings: Sequence[Timing], colors: dict[str, str]) -> None:
    """Stack the phases of each run; beside them, how long its step was."""
    axes.set_title("Seconds of a step, by phase")
    axes.set_ylabel("seconds, median of the steps")
    for place, timing in enumerate(timings):
        bottom = 0.0
        for phase, color in colors.items():
            height = timing.phases.get(phase, 0.0)
            axes.bar(place - 0.14, height, 0.46, bottom, color=color, edgecolor="white", linewidth=0.5)
            bottom += height
        axes.bar(place + 0.23, timing.step_seconds, 0.22, color=_STEP_COLOR)
        axes.annotate(f"{bottom:.2f}", (place - 0.14, bottom), (0, 3), textcoords="offset points", ha="center")
        seconds = timing.step_seconds
        axes.annotate(f"{seconds:.2f}", (place + 0.23, seconds), (0, 3), textcoords="offset points", ha="center")
    names = [f"{timing.run.name}\nsteps: {timing.num_steps}" for timing in timings]
    axes.set_xticks(range(len(timings)), names)
    axes.set_xlim(-0.6, len(timings) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)
    # In the order of the stack, the whole step first.
    handles = [Patch(color=_STEP_COLOR, label="whole step")]
    handles += [Patch(color=color, label=in_words(phase)) for phase, color in reversed(colors.items())]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _lane_names(timing: Timing) -> list[str]:
    pools = pools_of([timing.run])
    return [*pools, *(name for name in timing.lanes if name not in pools)]


def _length(timing: Timing) -> float:
    ends = [span.end for lane in timing.lanes.values() for span in lane]
    return max([*ends, 0.0 if ends else timing.step_seconds])


def _draw_lanes(axes: Axes, timing: Timing, names: Sequence[str], colors: dict[str, str], longest: float) -> None:
    """Draw a lane for each pool, idle where it is pale; at its end what `_use_of_pool` says of all steps."""
    axes.set_title(f"{timing.run.name}: step {timing.shown_step}" if timing.lanes else timing.run.name)
    length = _length(timing)
    for place, name in enumerate(names):
        axes.barh(place, length, _LANE, color=_IDLE_COLOR)
        busy = _of_pool(timing.run, name, "busy_fraction", median)
        if timing.lanes:
            for middle, height, span in _in_tracks(timing.lanes.get(name, []), place):
                _draw_span(axes, middle, height, span, colors.get(span.name, "#bdbdbd"), longest)
        elif busy is not None:
            axes.barh(place, length * busy, _LANE, color=_BUSY_COLOR)
            axes.text(length * busy / 2, place, "busy", ha="center", va="center", fontsize=8.5)
        axes.text(longest * 1.01, place, "\n".join(_use_of_pool(timing.run, name)), va="center", fontsize=9)
    axes.set_yticks(range(len(names)), [name if name == _CPU else f"pool {name}" for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.15)
    axes.grid(visible=False, axis="y")


def _use_of_pool(run: Run, pool: str) -> list[str]:
    """Say how busy a pool was, how busy its GPUs' kernels kept them, and the most memory in use on one of them."""
    shown = (
        ("busy_fraction", median, "{:.0%} busy"),
        ("gpu_utilization", median, "{:.0%} GPU use"),
        ("memory_peak_gb", max, "{:.1f} GB peak"),
    )
    values = ((_of_pool(run, pool, metric, reduce), text) for metric, reduce, text in shown)
    return [text.format(value) for value, text in values if value is not None]


def _in_tracks(spans: Sequence[Span], place: float) -> Iterator[tuple[float, float, Span]]:
    """Yield the middle and the height of each span: as many tracks of the lane as keep spans apart, mostly one."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((track for track in tracks if track[-1].end <= span.start + _SAME_TIME_S), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    for number, track in enumerate(tracks):
        height = _LANE / len(tracks)
        yield from ((place - _LANE / 2 + (number + 0.5) * height, height, span) for span in track)


def _draw_span(axes: Axes, place: float, height: float, span: Span, color: str, longest: float) -> None:
    seconds = span.end - span.start
    axes.barh(place, seconds, height, span.start, color=color, edgecolor="white", linewidth=0.6)
    if seconds > _NAMED_FROM * longest:
        text = in_words(span.name) if height < _LANE else in_words(span.name).replace(" ", "\n", 1)
        axes.text(
            span.start + seconds / 2, place, text, ha="center", va="center", fontsize=7.5, color=_readable_on(color)
        )


def _readable_on(color: str) -> str:
    """Return black or white, whichever is easier to read (relative luminance, ITU-R BT.709)."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "white"


def _of_pool(run: Run, pool: str, metric: str, reduce: Callable[[Sequence[float]], float]) -> float | None:
    """Reduce a pool's metric over the steps that count; None where there is none."""
    points = run.get(f"pool/{pool}/{metric}")
    if points is None:
        return None
    return reduce(_measured(points[1]).tolist())


def _measured(values: Series) -> Series:
    """Return the values of the steps that count: after the first three, or the first one of a shorter run."""
    return values[_WARM_UP_STEPS if len(values) > _WARM_UP_STEPS else min(1, len(values) - 1) :]
