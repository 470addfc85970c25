"""The command line: `python -m tools.suite`, which `make test` calls. The exit code is 0 if every part passed."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from tools.cluster.layout import Layout
from tools.suite.parts import run

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


if __name__ == "__main__":
    end_parts_at_sigterm()
    sys.exit(run(Layout.from_environment()))
