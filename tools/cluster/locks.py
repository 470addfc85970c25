"""File locks between commands. The kernel frees them with their process, so a killed command leaves none behind."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.cluster.waiting import wait_until


@contextmanager
def held(path: Path, *, limit: float) -> Iterator[None]:
    """Hold the lock `path`, after waiting at most `limit` seconds for its holder.

    Raises:
        ClusterError: another command holds it all that time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:

        def missing() -> str:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"another command holds {path}"
            return ""

        wait_until("other commands on this cluster", missing, limit=limit)
        yield
