"""`make test`: every part of the tests in order, with the slow builds in the background, and a table at the end.

    foreground   lint types contracts generate-check unit golden oracles architecture trainer ─┬─ integration ─ e2e
    background   binaries, cluster, images  ───────────────────────────────────────────────────┘

A part that fails does not stop the next one, so that one run shows everything; a failed background build ends the run
at once, because nothing after it could pass. A cluster that ran before stays; one that this started is taken down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.cluster import strays
from tools.cluster.cluster import is_healthy
from tools.cluster.errors import tail
from tools.cluster.layout import PROJECT, Layout

# part (a target of the Makefile) -> the seconds that it may take
QUICK_PARTS = {
    "lint": 300,
    "types": 600,
    "contracts": 300,
    "generate-check": 300,
    "unit": 1800,
    "golden": 900,
    "oracles": 1800,
    "architecture": 600,
    # It needs no cluster, and there is much to build meanwhile.
    "trainer": 5400,
}
PASSED = "passed"
CLUSTER_PARTS = {"integration": 3600, "e2e": 5400}
BACKGROUND_LIMIT_SECONDS = 4800
CLUSTER_DOWN_LIMIT_SECONDS = 300
# In the project.
BACKGROUND_LOG = Path(".build") / "background.log"
_MAKE = ("make", "--no-print-directory")


@dataclass(frozen=True)
class PartResult:
    """How one part went; `result` is passed, or says why not."""

    name: str
    result: str
    seconds: float


class BackgroundFailed(RuntimeError):
    """The cluster or an image could not be made."""


def run(layout: Layout, project: Path = PROJECT) -> int:
    """Run everything; return 0 if all parts passed, else 1."""
    console = Console(highlight=False, soft_wrap=True)
    was_healthy = is_healthy(layout)
    results: list[PartResult] = []
    try:
        with _background(project) as background:
            for name, limit in QUICK_PARTS.items():
                results.append(_run_part(name, limit, project, console, background))
            results.append(_wait_for(background, console))
        for name, limit in CLUSTER_PARTS.items():
            results.append(_run_part(name, limit, project, console, None))
    except BackgroundFailed as error:
        console.print(f"[bold red]FAILED[/] building the cluster and the images: {error}", markup=True)
        console.print(tail(project / BACKGROUND_LOG, lines=40), markup=False)
        results.append(PartResult("cluster and images", str(error), 0.0))
    finally:
        if not was_healthy:
            _run_part("cluster-down", CLUSTER_DOWN_LIMIT_SECONDS, project, console, None)
    _print_table(results, console)
    return 0 if results and all(result.result == PASSED for result in results) else 1


@contextmanager
def _background(project: Path) -> Iterator[subprocess.Popen[bytes]]:
    path = project / BACKGROUND_LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        process = subprocess.Popen(
            [*_MAKE, "cluster-up", "images"],
            cwd=project,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def _run_part(
    name: str, limit: float, project: Path, console: Console, background: subprocess.Popen[bytes] | None
) -> PartResult:
    console.rule(f"make {name}")
    start = time.monotonic()
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*_MAKE, name],
        cwd=project,
        stdin=subprocess.DEVNULL,
        env={**os.environ, strays.MARK: mark},
        start_new_session=True,
    )
    try:
        while process.poll() is None and time.monotonic() - start < limit:
            _require_alive(background)
            time.sleep(0.2)
        code = process.poll()
    finally:
        _end(process)
        for command in strays.end_strays(mark):
            console.print(f"left running by {name}, and ended: {command}", markup=False)
    result = PASSED if code == 0 else "failed" if code is not None else f"ended after its limit of {limit:g} s"
    return PartResult(name, result, time.monotonic() - start)


def _wait_for(background: subprocess.Popen[bytes], console: Console) -> PartResult:
    start = time.monotonic()
    if background.poll() is None:
        console.rule("waiting for the cluster and the images")
        console.print(f"log: {BACKGROUND_LOG}")
    while background.poll() is None:
        if time.monotonic() - start > BACKGROUND_LIMIT_SECONDS:
            raise BackgroundFailed(f"not ready {BACKGROUND_LIMIT_SECONDS} s after the quick parts")
        time.sleep(0.5)
    _require_alive(background)
    return PartResult("wait for cluster and images", PASSED, time.monotonic() - start)


def _require_alive(background: subprocess.Popen[bytes] | None) -> None:
    if background is not None and background.poll() not in (None, 0):
        raise BackgroundFailed(f"exit code {background.returncode}; the end of {BACKGROUND_LOG}:")


def _end(process: subprocess.Popen[bytes], grace_seconds: float = 20.0) -> None:
    """End the process group of an unfinished part: SIGTERM first, so that it can tidy up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_seconds)


def _print_table(results: Sequence[PartResult], console: Console) -> None:
    table = Table("part", "result", "seconds")
    for result in results:
        color = "green" if result.result == PASSED else "red"
        table.add_row(result.name, f"[{color}]{result.result}[/]", f"{result.seconds:.1f}")
    console.print(table)
