"""Addresses and ports of this host, for the rendezvous of FSDP ranks and of the weight transfer."""

from __future__ import annotations

import socket


def free_port(address: str = "") -> int:
    """Return a TCP port that is free on this host now; call it where the listener will run."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def local_address(towards: str) -> str:
    """Return the address of this host's interface that routes to another host. Sends nothing."""
    with socket.socket(_family(towards), socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        address: str = probe.getsockname()[0]
        return address


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
