"""Ports for servers that a test starts in another process."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 29_999
"""Between ports that others take at any time, also between the choice here and the server's start: Ray's workers listen
on 10002 to 19999, NodePorts of Kubernetes are 30000 to 32767, and the kernel gives outgoing connections those above."""
_given: set[int] = set()


def server_port() -> int:
    """Return a TCP port on which nobody listens and that no outgoing connection will get.

    A process gets each port once: the server of an earlier one may not listen yet.
    """
    while True:
        port = random.randint(_FIRST, _LAST)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            _given.add(port)
            return port
