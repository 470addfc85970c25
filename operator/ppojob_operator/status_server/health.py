"""Whether the operator makes progress: pulses that must not grow old, and checks that name a problem.

`main.py` makes one and gives the loop a pulse to beat; /healthz and /readyz show it. A process that is merely alive
is not healthy here: a loop that stands still or a watch that froze must make the kubelet restart the pod.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

Check = Callable[[], str | None]
"""Returns a sentence that names the problem, or None."""


@dataclass
class Pulse:
    """A sign of life of one loop."""

    name: str
    limit_seconds: float
    clock: Callable[[], float]
    last: float

    def beat(self) -> None:
        """Say that the loop went round."""
        self.last = self.clock()

    def problem(self) -> str | None:
        """Return what is wrong if the last beat is too long ago."""
        age = self.clock() - self.last
        if age <= self.limit_seconds:
            return None
        return f"stands still for {age:.0f} s, {self.limit_seconds:g} s are allowed"


class Health:
    """Everything that /healthz and /readyz look at."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._live: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def pulse(self, name: str, limit_seconds: float) -> Pulse:
        """Return a new pulse; it counts from now, so a loop that never starts is noticed too."""
        pulse = Pulse(name, limit_seconds, self._clock, self._clock())
        self._live[name] = pulse.problem
        return pulse

    def check(self, name: str, check: Check) -> None:
        """Let /healthz fail while the check names a problem."""
        self._live[name] = check

    def ready_when(self, name: str, check: Check) -> None:
        """Let /readyz fail while the check names a problem."""
        self._ready[name] = check

    def forget(self, name: str) -> None:
        """Remove the pulse and the checks of this name, because their part of the operator has stopped gracefully."""
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
