"""Pictures of the dashboards without a Grafana: the panels in their places, filled by a Prometheus with simulated jobs.

`python -m tests.monitoring.preview FOLDER [--namespace REGEX] [--ppojob REGEX] [--operator REGEX]` writes a PNG for
each dashboard. It draws what Grafana gets, unit, axis, limits, stacks and legends, and not how Grafana looks.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from tests.monitoring import expressions, prometheus, simulation
from tests.monitoring.prometheus import Line, Prometheus

GRID = 24
_INCHES = (0.72, 0.34)
"""Width and height of a cell of the grid."""
_STEP_S = 60.0
_NAMED_FROM = 12
"""Steps of a state that has room for its name."""
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
_SUFFIXES = {"s": " s", "decgbytes": " GB", "GBs": " GB/s", "ops": " ops/s", "reqps": " req/s", "wps": " wr/s"}
_STATES = {
    "Running": "#56a64b", "Succeeded": "#3274d9", "Failed": "#e02f44", "Restarting": "#ff9830", "Suspended": "#a352cc",
    "Suspending": "#a352cc",
}  # fmt: skip


def main() -> int:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--namespace", default=".*")
    parser.add_argument("--ppojob", default=".*")
    parser.add_argument("--operator", default=".*")
    arguments = parser.parse_args()
    if not prometheus.are_installed():
        print(prometheus.MISSING, file=sys.stderr)
        return 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with prometheus.serving(folder, prometheus.load(simulation.scraped(), folder)) as server:
            for name, dashboard in expressions.dashboards().items():
                chosen = {name: getattr(arguments, name) for name in ("namespace", "ppojob", "operator")}
                draw(dashboard, answers(server, dashboard, chosen)).savefig(arguments.folder / f"{name}.png", dpi=70)
    return 0


def answers(server: Prometheus, dashboard: dict[str, Any], chosen: Mapping[str, str]) -> dict[str, list[list[Line]]]:
    """Return what each panel's queries find over the simulated hours, by the panel's title."""
    start, end = simulation.START, simulation.START + simulation.LENGTH
    return {
        panel["title"]: [
            server.over(with_values(query["expr"], dashboard["selected"], chosen), start, end, _STEP_S)
            for query in panel["queries"]
        ]
        for panel in expressions.panels_of(dashboard)
    }


def with_values(expression: str, selected: str, chosen: Mapping[str, str]) -> str:
    """Return an expression as Grafana sends it, each variable replaced by a regular expression."""
    return re.sub(r"\$(\w+)", lambda match: chosen[match[1]], expression.replace("SELECTED", selected))


def draw(dashboard: Mapping[str, Any], found: Mapping[str, Sequence[Sequence[Line]]]) -> Figure:
    """Return the dashboard as a figure."""
    places, height = _places(dashboard)
    figure = Figure(figsize=(GRID * _INCHES[0], height * _INCHES[1]))
    for title, y in places["rows"]:
        figure.text(0.005, 1 - (y + 0.7) / height, title, fontsize=13, weight="bold")
    for panel, (x, y, width, cells) in places["panels"]:
        box = ((x + 1.15) / GRID, 1 - (y + cells - 1.9) / height, (width - 1.45) / GRID, (cells - 3.1) / height)
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], fontsize=10, loc="left")
        _panel(axes, panel, found[panel["title"]])
    return figure


def _places(dashboard: Mapping[str, Any]) -> tuple[dict[str, list[Any]], int]:
    """Lay panels out as templates/_dashboard.tpl does; returns rows and panels with their cells, and the height."""
    rows, panels, y = [], [], 0
    for row in dashboard["rows"]:
        rows.append((row["title"], y))
        x, y, cells = 0, y + 1, 8
        for panel in row["panels"]:
            cells = 4 if panel.get("kind") == "stat" else 8
            width = panel.get("width", cells)
            x, y = (0, y + cells) if x + width > GRID else (x, y)
            panels.append((panel, (x, y, width, cells)))
            x += width
        y += cells
    return {"rows": rows, "panels": panels}, y


def _panel(axes: Axes, panel: Mapping[str, Any], found: Sequence[Sequence[Line]]) -> None:
    if not any(found):
        axes.text(0.5, 0.5, panel.get("empty", "No data"), ha="center", color="#808080", transform=axes.transAxes)
    kind = panel.get("kind", "timeseries")
    if kind == "stat":
        axes.axis("off")
        axes.text(0.0, 0.3, _number(found[0][0].points[-1][1]) if found[0] else "", fontsize=20)
    elif kind == "state-timeline":
        _timeline(axes, panel, found[0])
    else:
        _lines(axes, panel, found)


def _lines(axes: Axes, panel: Mapping[str, Any], found: Sequence[Sequence[Line]]) -> None:
    named = [
        (name(query["legend"], line), line)
        for query, lines in zip(panel["queries"], found, strict=True)
        for line in lines
    ]
    bottom: dict[float, float] = {}
    for index, (words, line) in enumerate(named):
        times = np.array([at for at, _ in line.points], dtype=np.float64)
        values = np.array([value for _, value in line.points])
        floor = np.array([bottom.get(at, 0.0) for at in times]) if panel.get("stack") else np.zeros(len(times))
        values = values + floor
        bottom |= dict(zip(times.tolist(), values.tolist(), strict=True)) if panel.get("stack") else {}
        breaks = np.flatnonzero(np.diff(times) > 1.5 * _STEP_S) + 1
        times, values, floor = (np.insert(each, breaks, np.nan) for each in (times, values, floor))
        color = _COLORS[index % len(_COLORS)]
        axes.plot(times, values, label=words, linewidth=1.1, color=color)
        if panel.get("stack"):
            axes.fill_between(times, floor, values, alpha=0.3, color=color, linewidth=0)
    if "threshold" in panel:
        axes.axhline(panel["threshold"], color="#e02f44", linewidth=0.9, linestyle="--")
    axes.set_ylim(panel.get("min"), panel.get("max"))
    axes.set_ylabel(panel["axis"], fontsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_unit(value, panel["unit"])))
    if panel["unit"] == "s" and (top := axes.get_ylim()[1]) > 120:
        nice = (60, 300, 600, 1200, 1800, 3600, 7200)
        axes.yaxis.set_major_locator(MultipleLocator(next((step for step in nice if top / step <= 5), 14400)))
    if panel.get("decimals") == 0:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _time_axis(axes)
    axes.grid(color="#e8e8e8")
    if not named:
        return
    columns = 2 if len(named) > 3 else 1
    axes.legend(
        fontsize=6,
        loc="upper left",
        bbox_to_anchor=(0, -0.1),
        frameon=False,
        ncols=columns if panel.get("stack") else 2,
    )


def _timeline(axes: Axes, panel: Mapping[str, Any], lines: Sequence[Line]) -> None:
    for row, line in enumerate(lines):
        for at, value in line.points:
            state = panel["mappings"][int(value)]
            axes.barh(row, _STEP_S, left=at, color=_STATES.get(state, "#f2cc0c"), height=0.7)
        starts = [i for i, (_, value) in enumerate(line.points) if i == 0 or line.points[i - 1][1] != value]
        for start, end in zip(starts, [*starts[1:], len(line.points)], strict=True):
            if end - start >= _NAMED_FROM:
                at, value = line.points[start]
                axes.text(at + 60, row, panel["mappings"][int(value)], fontsize=6, va="center")
    axes.set_yticks(range(len(lines)), [name(panel["queries"][0]["legend"], line) for line in lines])
    _time_axis(axes)


def _time_axis(axes: Axes) -> None:
    axes.set_xlim(simulation.START, simulation.START + simulation.LENGTH)
    axes.set_xticks(np.arange(simulation.START, simulation.START + simulation.LENGTH + 1, 1800))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{datetime.fromtimestamp(at, UTC):%H:%M}"))
    axes.tick_params(labelsize=7)


def name(legend: str, line: Line) -> str:
    """Return the legend of a series, its labels filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: line.labels.get(match[1], ""), legend)


def in_unit(value: float, unit: str) -> str:
    """Return a value in a unit of Grafana, about as Grafana writes it."""
    if unit == "percentunit":
        return f"{100 * value:.0f}%"
    if unit == "s" and abs(value) >= 60:
        return f"{value / 3600:.2g} h" if abs(value) >= 3600 else f"{value / 60:.3g} min"
    if unit == "bytes":
        return f"{value / 2**30:.3g} GiB"
    return f"{_number(value)}{_SUFFIXES.get(unit, '')}"


def _number(value: float) -> str:
    return f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
