"""Runs every part of the tests in two lanes beside each other, prints what each said, and a table at the end.

    tests     lint contracts generate-check golden architecture trainer types unit oracles unit-slow
    cluster   cluster-up images integration e2e

The lanes share two cores: the tests of the first one compute, those of the second mostly wait for the cluster. Whole
jobs on Ray (trainer) and on the cluster (e2e) each take up to 16 GiB of memory, so one waits for the other; trainer
comes early, while the cluster's lane is still at integration.

Each part writes to a separate log, which is printed when the part ends. If a part fails, the next one runs, so that
one run shows everything. A cluster or an image that cannot be made ends the run at once, because the rest of its
lane could not pass. A cluster that ran before stays; one that this started is taken down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
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

    `is_foundation`: the rest of its lane stands on it, and what it leaves running is meant to run.
    `is_large`: it takes most of the machine's memory, so it never runs beside another large part.
    """

    name: str
    limit: float
    is_foundation: bool = False
    is_large: bool = False


@dataclass(frozen=True)
class PartResult:
    """How one part went; `result` is passed, or says why not. `start` counts from the start of the run."""

    name: str
    result: str
    start: float
    seconds: float


LANES: Mapping[str, Sequence[Part]] = {
    "tests": (
        Part("lint", 300),
        Part("contracts", 300),
        Part("generate-check", 300),
        Part("golden", 900),
        Part("architecture", 600),
        Part("trainer", 3600, is_large=True),
        Part("types", 600),
        Part("unit", 1800),
        Part("oracles", 1800),
        Part("unit-slow", 1800),
    ),
    "cluster": (
        Part("cluster-up", 4800, is_foundation=True),
        Part("images", 3600, is_foundation=True),
        Part("integration", 3600),
        Part("e2e", 5400, is_large=True),
    ),
}
CLUSTER_DOWN = Part("cluster-down", 300, is_foundation=True)
PASSED = "passed"
# In the project.
LOGS = Path(".build") / "test"
_MAKE = ("make", "--no-print-directory")
_POLL_SECONDS = 0.2


def run(layout: Layout, project: Path = PROJECT, lanes: Mapping[str, Sequence[Part]] = LANES) -> int:
    """Run everything; return 0 if all parts passed, else 1."""
    suite = _Suite(project)
    was_healthy = is_healthy(layout)
    try:
        suite.run_lanes(lanes.values())
    finally:
        if not was_healthy:
            suite.stop.clear()
            suite.run_part(CLUSTER_DOWN)
        suite.print_table()
    planned = sum(len(parts) for parts in lanes.values())
    results = [result for result in suite.results if result.name != CLUSTER_DOWN.name]
    return 0 if len(results) == planned and all(result.result == PASSED for result in suite.results) else 1


@dataclass
class _Suite:
    """One run: its results, in the order in which the parts ended."""

    project: Path
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    results: list[PartResult] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _memory: threading.Lock = field(default_factory=threading.Lock)
    """Held by the large part that runs."""
    _start: float = field(default_factory=time.monotonic)

    def run_lanes(self, lanes: Collection[Sequence[Part]]) -> None:
        """Run the lanes beside each other; whatever interrupts this stops them."""
        with ThreadPoolExecutor(len(lanes)) as threads:
            ends = [threads.submit(self.run_lane, parts) for parts in lanes]
            try:
                for end in ends:
                    end.result()
            finally:
                self.stop.set()

    def run_lane(self, parts: Sequence[Part]) -> None:
        """Run the parts one after the other, until the run is stopped; a foundation that fails stops it."""
        for part in parts:
            with self._memory if part.is_large else contextlib.nullcontext():
                if self.stop.is_set():
                    return
                if not self.run_part(part) and part.is_foundation:
                    self.stop.set()

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
