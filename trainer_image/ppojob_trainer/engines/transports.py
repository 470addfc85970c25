"""Over what a process is connected to others: what NCCL chose, from its own log, and gloo by name.

NCCL says nowhere else which transport it took, and takes a slow one in silence. So each process that uses it has NCCL
log its connections into a file beside the process's own log, some kilobytes, and reads it after connecting.
Called by the engines where connections are made. It fails nothing: what cannot be read is an empty answer.
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
    """Have NCCL in this process, and in the processes that it starts, log its connections to `<stem>.nccl-<pid>.log`.

    What the user has set stays: NCCL reads these variables when it is used first.
    """
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT")
    os.environ.setdefault(_FILE, f"{stem}.nccl-%p.log")


def transports_of(log: str) -> Transports:
    """Return how many other ranks the process that wrote this log sends to, by transport.

    NCCL opens several channels to a rank; one is counted. Network transports have a line at both ends; the sender's is.
    Source: the lines of p2pSendSetup, shmSendSetup and sendSetup in NCCL's transport/{p2p,shm,net}.cc, 2.4 to 2.28.
    """
    found = {
        (line["sender"], line["receiver"], _name(line)) for line in _LINE.finditer(log) if line["end"] != "receive"
    }
    return dict(Counter(name for _, _, name in sorted(found)))


class NcclLog:
    """This process's file of `log_connections`, from where it ends when this is made."""

    def __init__(self) -> None:
        name = os.environ.get(_FILE, "").replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
        self._path = Path(name) if name else None
        self._begin = len(self._read(0))

    def take(self) -> Transports:
        """Return the transports of the connections that were made since."""
        return transports_of(self._read(self._begin).decode(errors="replace"))

    def _read(self, begin: int) -> bytes:
        # A terminal or a pipe, which NCCL may write to as well, would not end.
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
