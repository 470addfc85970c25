"""The transports by which a process is connected to others: for NCCL from its log, for gloo by name.

NCCL reports only in its log which transport it chose, and chooses a slow one without a warning. So each process that
uses NCCL makes it log its connections to a file beside the process's own log (a few kilobytes), and reads that file
after connecting. Called by the engines when they connect. It raises no errors: a file that cannot be read gives an
empty answer.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Final

Transports = dict[str, int]
"""Connections to other processes by transport: `P2P/CUMEM`, `SHM`, `NET/Socket`, `NET/IB/GDRDMA`, `GLOO/TCP`, ..."""

GLOO: Final = "GLOO/TCP"
CUDA_IPC: Final = "CUDA_IPC"

_FILE: Final = "NCCL_DEBUG_FILE"
_LINE = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (?P<sender>\d+)(?:\[\w+\])? -> (?P<receiver>\d+)(?:\[\w+\])?"
    r"(?: \[(?P<end>send|receive)\])? via "
    r"(?:P2P/(?P<memory>[A-Za-z]+)|(?P<host>SHM/|direct shared memory)"
    r"|NET/(?P<net>[^/\n]+)/\d+(?:\(\d+\))?(?P<gdr>/GDRDMA)?)"
)


def log_connections(stem: Path) -> None:
    """Make NCCL in this process, and in the processes that it starts, log its connections to `<stem>.nccl-<pid>.log`.

    Variables that the user has set are kept. NCCL reads them at its first use.
    """
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT")
    os.environ.setdefault(_FILE, f"{stem}.nccl-%p.log")


def transports_of(log: str) -> Transports:
    """Return the number of ranks that the process of this log sends to, by transport.

    NCCL opens several channels to a rank; they count once. Network transports log a line at both ends; only the
    sender's counts. Source: the log lines of p2pSendSetup, shmSendSetup and sendSetup in NCCL's
    transport/{p2p,shm,net}.cc, 2.4 to 2.28.
    """
    found = {
        (line["sender"], line["receiver"], _name(line)) for line in _LINE.finditer(log) if line["end"] != "receive"
    }
    return dict(Counter(name for _, _, name in sorted(found)))


class NcclLog:
    """This process's file of `log_connections`, read from its end at the time of creation."""

    def __init__(self) -> None:
        name = os.environ.get(_FILE, "").replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
        self._path = Path(name) if name else None
        self._begin = len(self._read(0))

    def take(self) -> Transports:
        """Return the transports of the connections that were opened since."""
        return transports_of(self._read(self._begin).decode(errors="replace"))

    def _read(self, begin: int) -> bytes:
        # NCCL may also write to a terminal or a pipe; reading those would never end.
        if self._path is None or not self._path.is_file():
            return b""
        with self._path.open("rb") as file:
            file.seek(begin)
            return file.read()


def _name(line: re.Match[str]) -> str:
    if line["memory"]:
        return f"P2P/{line['memory']}"
    if line["host"]:
        return "SHM"
    return f"NET/{line['net']}{line['gdr'] or ''}"
