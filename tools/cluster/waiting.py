"""Waiting with a limit: every wait in this package goes through `wait_until`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tools.cluster.errors import ClusterError


def wait_until(
    what: str, missing: Callable[[], str], *, limit: float, interval: float = 0.25, log: Path | None = None
) -> float:
    """Call `missing` until it returns "" (nothing is missing any more); return the seconds that it took.

    The last call begins after the limit: this process itself may have had to wait until then.

    Raises:
        ClusterError: after `limit` seconds, with the last thing that was missing and the end of `log`.
    """
    start, is_late = time.monotonic(), False
    while reason := missing():
        if is_late:
            raise ClusterError(f"waited {limit:g} s for {what}; still missing: {reason}", log)
        time.sleep(interval)
        is_late = time.monotonic() - start > limit
    return time.monotonic() - start
