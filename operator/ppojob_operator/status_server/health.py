"""Liveness and readiness: heartbeats of the loops, and checks that name a problem.

`main.py` creates one `Health`; /healthz and /readyz return it. A running process is not enough: if a loop or a watch is
stuck, /healthz fails, so that the kubelet restarts the pod.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

Check = Callable[[], str | None]
"""Returns a sentence that names the problem, or None."""


@dataclass
class Heartbeat:
    """The last time that one loop ran."""

    name: str
    limit_seconds: float
    clock: Callable[[], float]
    last: float

    def beat(self) -> None:
        """Record that the loop ran."""
        self.last = self.clock()

    def problem(self) -> str | None:
        """Return the problem if the last beat is too long ago."""
        age = self.clock() - self.last
        if age <= self.limit_seconds:
            return None
        return f"has not run for {age:.0f} s; the limit is {self.limit_seconds:g} s"


class Health:
    """The checks of /healthz and /readyz."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._live: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def heartbeat(self, name: str, limit_seconds: float) -> Heartbeat:
        """Return a new heartbeat. Its age counts from now, so a loop that never starts fails too."""
        heartbeat = Heartbeat(name, limit_seconds, self._clock, self._clock())
        self._live[name] = heartbeat.problem
        return heartbeat

    def check(self, name: str, check: Check) -> None:
        """Make /healthz fail while the check names a problem."""
        self._live[name] = check

    def ready_when(self, name: str, check: Check) -> None:
        """Make /readyz fail while the check names a problem."""
        self._ready[name] = check

    def forget(self, name: str) -> None:
        """Remove the heartbeat and the checks of this name, because that component has stopped gracefully."""
        self._live.pop(name, None)
        self._ready.pop(name, None)

    def live_problems(self) -> list[str]:
        """Return why the process should be restarted."""
        return _problems(self._live)

    def ready_problems(self) -> list[str]:
        """Return why no requests should be sent here."""
        return _problems(self._ready)


def _problems(checks: dict[str, Check]) -> list[str]:
    found = ((name, check()) for name, check in checks.items())
    return [f"{name}: {problem}" for name, problem in found if problem]
