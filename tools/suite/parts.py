"""Parts of a test run: each is a separate command, and several run beside each other.

Called by `targets` (`make test`) and `gpus` (`make gpu`), which say what the parts are, and which of them may run at
the same time. When a part ends, the first of the waiting ones that may run starts.

Each part writes to a separate log, which is printed when the part ends. If a part fails, the next one runs, so that
one run shows everything; only a foundation that fails ends the run at once, because the parts after it could not pass.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.suite import strays


@dataclass(frozen=True)
class Part(ABC):
    """A command, and the seconds that it may take.

    `name`: of its log, and in the table. `is_foundation`: the parts after it need what it made, and what it leaves
    running is meant to run.
    """

    name: str
    limit: float
    is_foundation: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def command(self) -> Sequence[str]:
        """The program and its arguments; it runs in the project's folder."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The part as the user would run it."""


@dataclass(frozen=True)
class PartResult:
    """How one part went.

    `result` is passed, or says why not; `start` counts from the start of the run; None: it did not start.
    """

    name: str
    result: str
    start: float | None
    seconds: float | None
    details: str = ""


PASSED, NOT_RUN = "passed", "not run"
_COLORS = {PASSED: "green", NOT_RUN: "yellow"}
_POLL_SECONDS = 0.2


P = TypeVar("P", bound=Part)


@dataclass
class Suite(ABC, Generic[P]):
    """One run: its results, in the order in which the parts ended."""

    project: Path
    waiting: list[P]
    """The parts that have not started, in their order."""
    logs: Path
    """The folder of the logs, in the project."""
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    results: list[PartResult] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    running: list[P] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a part ends or the run stops; guards `waiting` and `running`."""
    _start: float = field(default_factory=time.monotonic)

    @property
    @abstractmethod
    def at_a_time(self) -> int:
        """The most parts that run beside each other."""

    @abstractmethod
    def may_run(self, part: P) -> bool:
        """Whether a waiting part may start beside the running ones."""

    def reserve(self, part: P) -> None:
        """Reserve what a part needs: `running` has it now, and no other part starts meanwhile."""

    def environment(self, part: P) -> Mapping[str, str]:
        """Return the variables that a part gets besides this process's."""
        return {}

    def details(self, log: str) -> str:
        """Return what the table says of an ended part besides its result; "": nothing."""
        return ""

    def run_all(self) -> None:
        """Run the parts, at most `at_a_time` beside each other; whatever interrupts this stops them."""
        with ThreadPoolExecutor(self.at_a_time) as threads:
            ends = [threads.submit(self._run_parts) for _ in range(self.at_a_time)]
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

    def _end_part(self, part: P, passed: bool) -> None:
        with self._changed:
            # At once: no part after a foundation that failed may start.
            if part.is_foundation and not passed:
                self.stop.set()
            self.running.remove(part)
            self._changed.notify_all()

    def _next(self) -> P | None:
        """Wait for a part that may run, and take it; None if the run is over."""
        with self._changed:
            while self.waiting and not self.stop.is_set():
                part = next(filter(self.may_run, self.waiting), None)
                if part is not None:
                    self.waiting.remove(part)
                    self.running.append(part)
                    self.reserve(part)
                    return part
                self._changed.wait()
        return None

    def _stop(self) -> None:
        with self._changed:
            self.stop.set()
            self._changed.notify_all()

    def run_part(self, part: P) -> bool:
        """Run one part to its end, its limit, or the stop of the run; print its log; True if it passed."""
        log = self.project / self.logs / f"{part.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._say(f"> {part.title} (log: {log.relative_to(self.project)})")
        start = time.monotonic()
        mark = uuid.uuid4().hex
        # A program that writes its own title, as vLLM's do, would overwrite its environment, and so the mark.
        environment = {**os.environ, "SPT_NOENV": "1", **self.environment(part)}
        if not part.is_foundation:
            environment[strays.MARK] = mark
        with log.open("wb") as output:
            process = subprocess.Popen(
                part.command,
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
        seconds = time.monotonic() - start
        said = log.read_text(errors="replace")
        done = PartResult(part.name, result, start - self._start, seconds, self.details(said))
        self._report(part, done, said, left)
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

    def _report(self, part: P, done: PartResult, said: str, left_running: Sequence[str]) -> None:
        with self._lock:
            self.results.append(done)
            self.console.rule(f"{part.title}: {done.result} after {done.seconds:.0f} s")
            self.console.print(said, markup=False, end="")
            for command in left_running:
                self.console.print(f"left running by {done.name}, and ended: {command}", markup=False)

    def _say(self, line: str) -> None:
        with self._lock:
            self.console.print(line, markup=False)

    def print_table(self) -> None:
        """Print every part with its result, when it started and how long it took."""
        table = Table("part", "result", "started after, s", "seconds")
        if any(done.details for done in self.results):
            table.add_column("details")
        for done in self.results:
            times = ["" if seconds is None else f"{seconds:.0f}" for seconds in (done.start, done.seconds)]
            row = [done.name, f"[{_COLORS.get(done.result, 'red')}]{done.result}[/]", *times, escape(done.details)]
            table.add_row(*row[: len(table.columns)])
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
