"""Follows a PPOJob until it is complete or has failed: a live table on a terminal, one line a change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from tools.cluster.demo import progress as reading
from tools.cluster.demo.target import Target
from tools.cluster.errors import ClusterError

INTERVAL_SECONDS = 2.0


@dataclass(frozen=True)
class Followed:
    """How it ended; `first_step_seconds` from the apply to the first PPO step that the status showed."""

    finished: str
    seconds: float
    first_step_seconds: float | None


def follow(target: Target, name: str, *, start: float, limit: float, console: Console) -> Followed:
    """Watch the job `name`, applied at the monotonic time `start`.

    Raises:
        ClusterError: it is not finished `limit` seconds after its start.
    """
    if not console.is_terminal:
        lines: list[str] = []

        def print_change(progress: reading.Progress, seconds: float) -> None:
            line = progress.line()
            if lines[-1:] != [line]:
                lines.append(line)
                console.print(f"  {seconds:5.0f} s  {line}", markup=False)

        return _follow(target, name, start, limit, print_change)
    with Live(console=console, auto_refresh=False) as live:
        return _follow(
            target, name, start, limit, lambda progress, seconds: live.update(progress.table(seconds), refresh=True)
        )


def _follow(
    target: Target, name: str, start: float, limit: float, show: Callable[[reading.Progress, float], None]
) -> Followed:
    first_step: float | None = None
    while True:
        progress = look(target, name)
        seconds = time.monotonic() - start
        show(progress, seconds)
        if first_step is None and progress.step > 0:
            first_step = seconds
        if progress.finished:
            return Followed(progress.finished, seconds, first_step)
        if seconds > limit:
            raise ClusterError(f"{name} is not finished after {limit:g} s; its progress: {progress.line()}")
        time.sleep(INTERVAL_SECONDS)


def look(target: Target, name: str) -> reading.Progress:
    """One observation of the job and its Events."""
    job = target.get("ppojob", name)
    # By uid: an earlier job of this name has left its Events behind.
    selector = f"--field-selector=involvedObject.uid={job['metadata']['uid']}"
    return reading.read(job, target.get("events", selector)["items"])
