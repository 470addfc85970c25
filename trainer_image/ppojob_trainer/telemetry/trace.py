"""The phases of the steps as a Chrome trace: a group of lanes for each pool, and one for what runs on CPU cores alone
(data, reward function); a lane for each role. Written by the controller, read by the picture of timings.

Format: "JSON Array Format" of Chrome's Trace Event Format, in which the closing bracket may be missing; so the file can
be opened (chrome://tracing, ui.perfetto.dev) while the run goes on and after a kill. Times are microseconds since 1970.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppojob_trainer.telemetry.appended_file import AppendedFile

logger = logging.getLogger(__name__)

MAX_EVENTS = 500_000
"""About 60 MB; a viewer opens no more, and a long run must not fill the storage."""


class TraceWriter:
    """Appends events to the file; a resumed run continues the same file. A full disk is logged and stops nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        events = _whole_events(path)
        self._num_events = len(events)
        self._lanes = _known_lanes(events)
        self._lock = threading.Lock()
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_text("[\n" + ",\n".join(events))
        aside.replace(path)
        self._file = AppendedFile(path)
        self._path, self._has_complained = path, False

    def record(self, name: str, *, pool: str, role: str, start: float, end: float, step: int) -> None:
        """Add a phase that ran from `start` to `end` (seconds since 1970)."""
        with self._lock:
            found = self._lane(pool, role)
            if found is None:
                return
            process, lane = found
            times = {"ts": round(start * 1e6), "dur": max(round((end - start) * 1e6), 0)}
            where = {"pid": process, "tid": lane}
            self._write({"name": name, "cat": role, "ph": "X", **where, **times, "args": {"step": step}})

    @contextmanager
    def span(self, name: str, *, pool: str, role: str, step: int) -> Iterator[None]:
        """Record the time of the block, even if it raises."""
        start = time.time()
        try:
            yield
        finally:
            self.record(name, pool=pool, role=role, start=start, end=time.time(), step=step)

    def close(self) -> None:
        """Close the array and the file; calling it again does nothing."""
        with self._lock:
            if not self._file.is_closed:
                self._append("\n]\n")
                self._file.close()

    def _lane(self, pool: str, role: str) -> tuple[int, int] | None:
        """Return the numbers of pool and role, and name them in the file the first time; None: that was refused."""
        key = (pool, role)
        if key not in self._lanes:
            pools = list(dict.fromkeys(known for known, _ in [*self._lanes, key]))
            process, lane = pools.index(pool) + 1, len(self._lanes) + 1
            names = {"pool": pool, "role": role}
            for kind, text in (("process_name", f"pool {pool}" if pool else "CPU"), ("thread_name", role)):
                event = {"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": text, **names}}
                if not self._write(event):
                    return None
            self._lanes[key] = (process, lane)
        return self._lanes[key]

    def _write(self, event: dict[str, Any]) -> bool:
        """Write an event; return whether it is in the file."""
        if self._num_events >= MAX_EVENTS or self._file.is_closed:
            return False
        is_written = self._append((",\n" if self._num_events else "") + json.dumps(event))
        self._num_events += is_written
        return is_written

    def _append(self, text: str) -> bool:
        """Append a text; return whether it was written."""
        try:
            self._file.append(text)
        except OSError as error:
            if not self._has_complained:
                logger.warning("%s lost phases, training continues: %s", self._path, error)
            self._has_complained = True
            return False
        self._has_complained = False
        return True


def _whole_events(path: Path) -> list[str]:
    """Return the complete events of an earlier attempt; an event that a kill truncated is left out."""
    lines = path.read_text().split("\n") if path.exists() else []
    events = [line.removesuffix(",") for line in lines if line.startswith("{")]
    return events if not events or _is_json(events[-1]) else events[:-1]


def _known_lanes(events: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the numbers that pools and roles got from an earlier attempt."""
    named = [json.loads(event) for event in events if event.startswith('{"name": "thread_name"')]
    return {(event["args"]["pool"], event["args"]["role"]): (event["pid"], event["tid"]) for event in named}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


@dataclass(frozen=True)
class Span:
    """A phase in a trace; start and end in seconds since 1970."""

    name: str
    pool: str
    role: str
    step: int
    start: float
    end: float


def read_trace(path: Path) -> list[Span]:
    """Return the phases of a trace, of a run that goes on or was killed too; none where there is no such file."""
    events = _whole_events(path)
    names = {number: lane for lane, number in _known_lanes(events).items()}
    found = []
    for event in map(json.loads, events):
        if event["ph"] == "X":
            pool, role = names[event["pid"], event["tid"]]
            start = event["ts"] / 1e6
            found.append(Span(event["name"], pool, role, event["args"]["step"], start, start + event["dur"] / 1e6))
    return found
