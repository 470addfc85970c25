"""What the controller itself finds wrong. Errors of the ports go through it untouched."""

from __future__ import annotations


class PhaseTimeoutError(RuntimeError):
    """A phase took longer than its limit."""

    def __init__(self, phase: str, role: str, seconds: float) -> None:
        super().__init__(
            f"phase {phase} of role {role} was not done within {seconds:g} s: look into the log of {role}, "
            "or raise trainer.phaseTimeoutSeconds"
        )
        self.phase = phase
        self.role = role


class StoppedError(Exception):
    """The run was asked to stop, and what it was doing was dropped."""
