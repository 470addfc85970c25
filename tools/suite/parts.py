"""Runs every part of the tests, two at a time, prints what each said, and a table at the end.

    cluster-up ─▶ images ─▶ integration ─▶ e2e
    lint, contracts, generate-check, golden, architecture, trainer, types, unit, oracles, unit-slow: in any order

When a part ends, the first of `PARTS` that may run starts. Whole jobs on Ray (trainer) and on the cluster (e2e) each
take up to 16 GiB of memory, so one waits for the other; meanwhile, small parts run. The cluster's parts come first,
because they wait more than they compute, and e2e, which is the longest way to the end, must begin early.

Each part writes to a separate log, which is printed when the part ends. If a part fails, the next one runs, so that
one run shows everything. A cluster or an image that cannot be made ends the run at once, because the parts after it
could not pass. A cluster that ran before stays; one that this started is taken down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.cluster.cluster import is_healthy
from tools.cluster.layout import PROJECT, Layout
from tools.suite import strays


@dataclass(frozen=True)
class Part:
    """A target of the Makefile and the seconds that it may take.

    `after`: the part that must have ended before; "": none. `is_foundation`: the parts after it need what it made, and
    what it leaves running is meant to run. `is_large`: it takes most of the machine's memory, so it never runs beside
    another large part.
    """

    name: str
    limit: float
    after: str = ""
    is_foundation: bool = False
    is_large: bool = False


@dataclass(frozen=True)
class PartResult:
    """How one part went; `result` is passed, or says why not. `start` counts from the start of the run."""

    name: str
    result: str
    start: float
    seconds: float


PARTS: Sequence[Part] = (
    Part("cluster-up", 4800, is_foundation=True),
    Part("images", 3600, after="cluster-up", is_foundation=True),
    Part("integration", 3600, after="images"),
    Part("e2e", 5400, after="integration", is_large=True),
    Part("lint", 300),
    Part("contracts", 300),
    Part("generate-check", 300),
    Part("golden", 900),
    Part("architecture", 600),
    Part("trainer", 4800, is_large=True),
    Part("types", 1200),
    Part("unit", 3600),
    Part("oracles", 1800),
    Part("unit-slow", 3600),
)
AT_A_TIME = 2
CLUSTER_DOWN = Part("cluster-down", 300, is_foundation=True)
PASSED = "passed"
# In the project.
LOGS = Path(".build") / "test"
_MAKE = ("make", "--no-print-directory")
_POLL_SECONDS = 0.2


def run(layout: Layout, project: Path = PROJECT, parts: Sequence[Part] = PARTS) -> int:
    """Run everything; return 0 if all parts passed, else 1."""
    suite = _Suite(project, list(parts))
    was_healthy = is_healthy(layout)
    try:
        suite.run_all()
    finally:
        if not was_healthy:
            suite.stop.clear()
            suite.run_part(CLUSTER_DOWN)
        suite.print_table()
    results = [result for result in suite.results if result.name != CLUSTER_DOWN.name]
    return 0 if len(results) == len(parts) and all(result.result == PASSED for result in suite.results) else 1


@dataclass
class _Suite:
    """One run: its results, in the order in which the parts ended."""

    project: Path
    waiting: list[Part]
    """The parts that have not started, in their order."""
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    results: list[PartResult] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: list[Part] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a part ends or the run stops; guards `waiting` and `_running`."""
    _start: float = field(default_factory=time.monotonic)

    def run_all(self) -> None:
        """Run the parts, so many at a time; whatever interrupts this stops them."""
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            ends = [threads.submit(self._run_parts) for _ in range(AT_A_TIME)]
            try:
                for end in ends:
                    end.result()
            finally:
                self._stop()

    def _run_parts(self) -> None:
        """Run parts until none is left, or the run is stopped; a foundation that fails stops it."""
        try:
            while part := self._next():
                self._end_part(part, self.run_part(part))
        except BaseException:
            self._stop()
            raise

    def _end_part(self, part: Part, passed: bool) -> None:
        with self._changed:
            # At once: no part after a foundation that failed may start.
            if part.is_foundation and not passed:
                self.stop.set()
            self._running.remove(part)
            self._changed.notify_all()

    def _next(self) -> Part | None:
        """Wait for a part that may run, and take it; None if the run is over."""
        with self._changed:
            while self.waiting and not self.stop.is_set():
                part = next(filter(self._may_run, self.waiting), None)
                if part is not None:
                    self.waiting.remove(part)
                    self._running.append(part)
                    return part
                self._changed.wait()
        return None

    def _may_run(self, part: Part) -> bool:
        not_ended = {other.name for other in (*self.waiting, *self._running)}
        return part.after not in not_ended and not (part.is_large and any(other.is_large for other in self._running))

    def _stop(self) -> None:
        with self._changed:
            self.stop.set()
            self._changed.notify_all()

    def run_part(self, part: Part) -> bool:
        """Run one part to its end, its limit, or the stop of the run; print its log; True if it passed."""
        log = self.project / LOGS / f"{part.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._say(f"> make {part.name} (log: {log.relative_to(self.project)})")
        start = time.monotonic()
        mark = uuid.uuid4().hex
        environment = os.environ if part.is_foundation else {**os.environ, strays.MARK: mark}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_MAKE, part.name],
                cwd=self.project,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            result = self._wait(process, start + part.limit) or f"ended after its limit of {part.limit:g} s"
        finally:
            _end(process)
            left = strays.end_strays(mark)
        done = PartResult(part.name, result, start - self._start, time.monotonic() - start)
        self._report(done, log, left)
        return result == PASSED

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> str:
        """How the process ended; "" if it still runs at the deadline."""
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return PASSED if process.returncode == 0 else "failed"
            if self.stop.is_set():
                return "ended with the run"
            time.sleep(_POLL_SECONDS)
        return ""

    def _report(self, done: PartResult, log: Path, left_running: Sequence[str]) -> None:
        with self._lock:
            self.results.append(done)
            self.console.rule(f"make {done.name}: {done.result} after {done.seconds:.0f} s")
            self.console.print(log.read_text(errors="replace"), markup=False, end="")
            for command in left_running:
                self.console.print(f"left running by {done.name}, and ended: {command}", markup=False)

    def _say(self, line: str) -> None:
        with self._lock:
            self.console.print(line, markup=False)

    def print_table(self) -> None:
        """Print every part with its result, when it started and how long it took."""
        table = Table("part", "result", "started after, s", "seconds")
        for done in self.results:
            color = "green" if done.result == PASSED else "red"
            table.add_row(done.name, f"[{color}]{done.result}[/]", f"{done.start:.0f}", f"{done.seconds:.0f}")
        self.console.print(table)
        self.console.print(f"all parts: {time.monotonic() - self._start:.0f} s")


def _end(process: subprocess.Popen[bytes], grace_seconds: float = 20.0) -> None:
    """End the process group of an unfinished part: SIGTERM first, so that it can tidy up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_seconds)
