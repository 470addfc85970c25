"""An event loop whose clock jumps: where nothing is left to do it is the time of the next timer, at once.

For tests of what waits (marker `virtual_time`): they take no time, and a busy machine cannot make them late. Only for
code that waits by asyncio's means and asks this loop for the time; a socket or a thread would find hours gone by.
"""

import asyncio
import selectors
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Never waits: the time that it was to wait has gone by."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to do and no timer is set: the test would wait for ever"
        self.now += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def now() -> float:
    """Return the running loop's time, in place of `time.monotonic`."""
    return asyncio.get_running_loop().time()
