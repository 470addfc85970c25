"""The cluster's long-lived processes: started in separate sessions, found again and ended by id.

A process id is reused by the kernel, so a record also holds the process's start time and the boot it belongs to: a
stale record can never end somebody else's process. Called by the modules that start something, and by `down`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout
from tools.cluster.waiting import wait_until

_KILL_SECONDS = 60.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Popen objects complain when they are collected before their process ends, and ours are meant to outlive us.
_STARTED: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Record:
    """What identifies a started process."""

    pid: int
    start_ticks: int
    boot: str
    command: list[str]

    def is_alive(self) -> bool:
        """True if this very process still runs (a zombie does not)."""
        return self.boot == boot_id() and start_ticks(self.pid) == self.start_ticks


def boot_id() -> str:
    """What identifies the time since the machine's last start."""
    return _BOOT_ID.read_text().strip()


def start_ticks(pid: int) -> int | None:
    """The start time of a running process in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


class Processes:
    """The processes of one cluster."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def start(
        self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
    ) -> Record:
        """Start `command` as the process `name`, its output appended to the log of that name.

        Raises:
            ClusterError: it runs already, cannot be started, or ends at once.
        """
        if self.is_running(name):
            raise ClusterError(f"{name} runs already; end it first")
        log = self._layout.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(argument) for argument in command]
        with log.open("a") as output:
            try:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise ClusterError(f"cannot start {name}: {error.strerror}: {arguments[0]}") from error
        _STARTED.append(process)
        ticks = start_ticks(process.pid)
        if ticks is None:
            raise ClusterError(f"{name} ended at once with code {process.poll()}", log)
        record = Record(process.pid, ticks, boot_id(), arguments)
        self._layout.processes.mkdir(parents=True, exist_ok=True)
        # Another command that reads it meanwhile must not find half of it.
        aside = self._layout.processes / f".{name}.{os.getpid()}"
        aside.write_text(json.dumps(asdict(record), indent=1))
        aside.replace(self._path(name))
        return record

    def record(self, name: str) -> Record | None:
        """The record of the process `name`; None if there is none that can be read."""
        try:
            return Record(**json.loads(self._path(name).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def is_running(self, name: str) -> bool:
        """True if the recorded process `name` runs."""
        record = self.record(name)
        return record is not None and record.is_alive()

    def recorded(self) -> list[str]:
        """The names that have a record, running or not."""
        return sorted(path.stem for path in self._layout.processes.glob("*.json"))

    def require_running(self, name: str) -> None:
        """Raise ClusterError, with the end of its log, if the process `name` has ended."""
        if not self.is_running(name):
            raise ClusterError(f"{name} has ended", self._layout.log(name))

    def stop(self, name: str, *, limit: float = 15.0) -> bool:
        """End the process `name` (SIGTERM, after `limit` seconds SIGKILL); True if it was running."""
        record = self.record(name)
        was_running = record is not None and record.is_alive()
        if record is not None and was_running:
            end(record.pid, record.start_ticks, limit=limit)
        self._path(name).unlink(missing_ok=True)
        return was_running

    def _path(self, name: str) -> Path:
        return self._layout.processes / f"{name}.json"


def end(pid: int, ticks: int, *, limit: float) -> None:
    """End the process that started at `ticks` and wait until it is gone.

    Raises:
        ClusterError: it outlives SIGKILL by a minute, in which a process with much memory ends on a busy machine too.
    """

    def still_there() -> str:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return f"process {pid} runs" if start_ticks(pid) == ticks else ""

    for signal_number, seconds in ((signal.SIGTERM, limit), (signal.SIGKILL, _KILL_SECONDS)):
        if not still_there():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)
        with contextlib.suppress(ClusterError):
            wait_until(f"the end of process {pid}", still_there, limit=seconds, interval=0.05)
    if reason := still_there():
        raise ClusterError(f"{reason} after SIGKILL; it may hang in the kernel")
