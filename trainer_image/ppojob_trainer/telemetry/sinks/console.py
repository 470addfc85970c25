"""The table on the console: one line per step, with the few numbers that say whether the run is healthy."""

import math

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from ppojob_trainer.telemetry.eta import Eta, in_words
from ppojob_trainer.telemetry.sinks.sink import Metrics

_COLUMNS = (
    ("reward", "critic/score/mean", "{:.3f}"),
    ("validation", "val-core/score/mean", "{:.3f}"),
    ("kl", "actor/ppo_kl", "{:.2e}"),
    ("response tokens", "response_length/mean", "{:.1f}"),
    ("tokens/s/gpu", "perf/throughput", "{:.0f}"),
    ("s/step", "timing_s/step", "{:.1f}"),
)
_ROWS_BETWEEN_HEADS = 20
_BAR_WIDTH = 12
WIDTH = 125
"""Characters of a row."""


class ConsoleSink:
    """Prints one row per step, and the head of the table every twenty rows."""

    def __init__(self, eta: Eta, *, console: Console | None = None) -> None:
        # A log file has no width.
        self._console = console or Console(width=WIDTH, highlight=False)
        self._eta = eta
        self._rows = 0

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Print the row of a step."""
        table = Table(box=None, padding=(0, 1), show_header=self._rows % _ROWS_BETWEEN_HEADS == 0)
        # A row for each step, and no bar that is drawn over: the same output goes to files and to Kubernetes.
        for title, width in (
            ("step", 11),
            ("", _BAR_WIDTH),
            *((name, max(len(name), 9)) for name, _, _ in _COLUMNS),
            ("left", 11),
        ):
            table.add_column(title, justify="right", width=width, no_wrap=True)
        cells = [_shown(metrics.get(metric), form) for _, metric, form in _COLUMNS]
        bar = ProgressBar(total=self._eta.total_steps, completed=step, width=_BAR_WIDTH)
        table.add_row(f"{step}/{self._eta.total_steps}", bar, *cells, in_words(self._eta.seconds))
        self._console.print(table)
        self._rows += 1

    def close(self) -> None:
        """Nothing to close."""


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value) if math.isfinite(value) else str(value)
