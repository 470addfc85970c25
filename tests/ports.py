"""Ports for servers that a test starts in another process."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 10_000, 31_999
"""Below the range from which the kernel takes the ports of outgoing connections (32768 and up). A port of that range
can be taken between the choice here and the server's start."""


def server_port() -> int:
    """Return a TCP port on which nobody listens and that no outgoing connection will get."""
    while True:
        port = random.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
