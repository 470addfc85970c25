"""Ports for servers that a test starts in another process."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_FIRST, _LAST = 20_000, 29_999
"""Between ports that others take at any time, also between the choice here and the server's start: Ray's workers listen
on 10002 to 19999, NodePorts of Kubernetes are 30000 to 32767, and the kernel gives outgoing connections those above."""
_LOCKS = Path(tempfile.gettempdir()) / f"ppojob-test-ports-{os.getuid()}"
"""A file for each port, locked by the process that got it: parts of the tests run beside each other."""


def server_port() -> int:
    """Return a TCP port on which nobody listens and that no outgoing connection will get.

    Until this process ends, neither it nor another one gets the port again: its server may not listen yet.
    """
    _LOCKS.mkdir(exist_ok=True)
    while True:
        port = random.randint(_FIRST, _LAST)
        file = os.open(_LOCKS / str(port), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            os.close(file)
            continue
        return port
