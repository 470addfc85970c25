"""Finds and ends what a part of the tests left running: the suite marks its parts' environment, children inherit it.

Called by the suite after each part. It refuses to look at processes without the mark.
"""

from __future__ import annotations

import contextlib

from tools.cluster import process_table
from tools.cluster.processes import end, start_ticks

MARK = "PPOJOB_TEST_PART"
GRACE_SECONDS = 5.0


def end_strays(mark: str) -> list[str]:
    """End the processes whose environment holds MARK=`mark`; return what they were.

    Raises:
        ClusterError: one of them outlives SIGKILL.
    """
    ended = []
    for pid in _marked(mark):
        ticks = start_ticks(pid)
        if ticks is None:
            continue
        ended.append(_command(pid))
        end(pid, ticks, limit=GRACE_SECONDS)
    return ended


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in process_table.pids():
        # A process that ends meanwhile, or another user's, is none of ours.
        with contextlib.suppress(OSError):
            if wanted in (process_table.PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def _command(pid: int) -> str:
    process = process_table.read(pid)
    return process.shown if process else f"process {pid}"
