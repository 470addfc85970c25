"""Which phase of which step the running code serves: set by the controller, sent with every call, set in the worker.

It lets a call say what it is for without another argument of every method: profiles are taken of chosen steps,
samples are written with their step, and a phase that takes too long is told who has not answered. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["CurrentPhase", "current_phase", "within_phase"]


@dataclass(frozen=True)
class CurrentPhase:
    """A phase that runs.

    deadline: when its limit is over, in seconds since 1970. unanswered: whom it still waited for when it was given up;
    filled in the controller by the calls themselves.
    """

    phase: str
    role: str
    step: int
    deadline: float
    unanswered: list[str] = field(default_factory=list, compare=False)


_current: ContextVar[CurrentPhase | None] = ContextVar("phase", default=None)


def current_phase() -> CurrentPhase | None:
    """Return the phase that the running code serves; None outside of any."""
    return _current.get()


@contextmanager
def within_phase(phase: CurrentPhase | None) -> Iterator[None]:
    """Let `phase` be the current one, here and in the tasks that are begun here."""
    token = _current.set(phase)
    try:
        yield
    finally:
        _current.reset(token)
