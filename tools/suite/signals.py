"""How a run of tests ends at SIGTERM. Called by the two programs of this folder."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["end_parts_at_sigterm"]


def end_parts_at_sigterm() -> None:
    """Let the first SIGTERM end the parts, and then this process; later ones change nothing.

    If a process group is ended, this process gets two: make passes the signal on to its children. The second one would
    interrupt what the first one began.
    """
    signal.signal(signal.SIGTERM, _interrupt_once)


def _interrupt_once(number: int, _: FrameType | None) -> None:
    # Not SIG_IGN, which the processes of the parts would inherit.
    signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt
