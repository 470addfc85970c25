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

    Raises:
        ClusterError: after `limit` seconds, with the last thing that was missing and the end of `log`.
    """
    start = time.monotonic()
    while reason := missing():
        if time.monotonic() - start > limit:
            raise ClusterError(f"waited {limit:g} s for {what}; still missing: {reason}", log)
        time.sleep(interval)
    return time.monotonic() - start
