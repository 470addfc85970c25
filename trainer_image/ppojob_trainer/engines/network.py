"""The address of this host towards another one, for the weight transfer."""

from __future__ import annotations

import socket


def local_address(towards: str) -> str:
    """Return the address of this host's interface that routes to another host. Sends nothing."""
    with socket.socket(_family(towards), socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        address: str = probe.getsockname()[0]
        return address


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
