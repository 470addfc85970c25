"""The phase and step of the running code: set by the controller, sent with every call, set in the worker.

It passes this context without another argument of every method: profiles are taken of chosen steps, samples are written
with their step, and the error of a phase that times out names the unanswered calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["CurrentPhase", "current_phase", "within_phase"]


@dataclass(frozen=True)
class CurrentPhase:
    """A running phase.

    deadline: the end of its time limit, in seconds since 1970. unanswered: the calls that it still waited for when it
    was cancelled; the calls themselves add them, in the controller.
    """

    phase: str
    role: str
    step: int
    deadline: float
    unanswered: list[str] = field(default_factory=list, compare=False)


_current: ContextVar[CurrentPhase | None] = ContextVar("phase", default=None)


def current_phase() -> CurrentPhase | None:
    """Return the phase of the running code; None outside any phase."""
    return _current.get()


@contextmanager
def within_phase(phase: CurrentPhase | None) -> Iterator[None]:
    """Make `phase` the current one, in the block and in tasks that are started there."""
    token = _current.set(phase)
    try:
        yield
    finally:
        _current.reset(token)
