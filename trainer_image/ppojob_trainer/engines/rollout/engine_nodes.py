"""The nodes over which an engine is divided, and how each of them notices that another one is gone.

    first node: vLLM's engine, and its workers there       each other node: an `EngineFollower` with its workers
        Followers: listens                         ◀────       keeps a connection: a token, then at most a failure

vLLM 0.32 does not notice it: the workers that are left would wait in a collective for the others. So the end of a
connection is the end of the engine, on both sides: that of a process, of its pod, and by TCP's own probes also that of
a host that ends without a word. Connections without the engine's token are closed: a scanner of ports ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ppojob_trainer.engines.errors import EngineLostError

__all__ = ["EngineNode", "Followers", "Loss", "connect_to_first", "free_port"]

LATER_S: Final = 1.0
_LONGEST_REASON: Final = 16_384

_PROBES: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and number: a host that does not answer any more is noticed after 20 s."""


@dataclass(frozen=True)
class EngineNode:
    """One of the nodes of an engine.

    index: 0 has the engine itself. number: of nodes; each has as many of the GPUs. address: of node 0. port: at which
    vLLM's workers meet there. watch_port: at which `Followers` listens. token: that it expects.
    """

    index: int
    number: int
    address: str
    port: int
    watch_port: int
    token: str


class Loss:
    """Why an engine cannot be used any more, though its processes run; `reason` is None while it can."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_known = asyncio.Event()

    def record(self, reason: str) -> None:
        """Record the reason, unless there is one."""
        self.reason = self.reason or reason
        self._is_known.set()

    def check(self) -> None:
        """Raise an EngineLostError if there is a reason."""
        if self.reason is not None:
            raise EngineLostError(self.reason)

    async def cause_of(self, seen: str) -> str:
        """Return the reason, with what was `seen` of it. It may become known a moment later: gloo is quicker."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_known.wait(), LATER_S)
        return seen if self.reason is None else f"{self.reason} ({seen})"


class Followers:
    """The connections of an engine's other nodes, on its first node."""

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        """`on_loss` gets the reason, in the event loop, once a connection has ended before `close`."""
        self._on_loss = on_loss
        self.token = secrets.token_hex(16)
        """What a node sends first."""
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self, address: str) -> int:
        """Listen at a free port of this node's address, and return it."""
        self._server = await asyncio.start_server(self._follow, address, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, *_ = writer.get_extra_info("peername")
        _keep_probing(writer.get_extra_info("socket"))
        try:
            token = await reader.readexactly(len(self.token))
        except (OSError, asyncio.IncompleteReadError):
            token = b""
        if not hmac.compare_digest(token, self.token.encode()):
            writer.close()
            return
        self._writers.append(writer)
        reason = b""
        # OSError: the host does not answer any more.
        with contextlib.suppress(OSError):
            reason = await reader.read(_LONGEST_REASON)
        writer.close()
        if self._server is not None:
            why = reason.decode(errors="replace") or "its process, its pod or its host has ended"
            self._on_loss(f"the engine has lost its workers on the node with address {address}: {why}")

    def close(self) -> None:
        """End the connections, and so the workers of the other nodes."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in self._writers:
            writer.close()


def connect_to_first(node: EngineNode, timeout_seconds: float) -> socket.socket:
    """Connect a node to the first one of its engine.

    Raises:
        OSError: nobody listened there in time.
    """
    connection = socket.create_connection((node.address, node.watch_port), timeout_seconds)
    connection.settimeout(None)
    _keep_probing(connection)
    connection.sendall(node.token.encode())
    return connection


def _keep_probing(connection: socket.socket) -> None:
    """Have the system find out whether the other host still answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def free_port(address: str) -> int:
    """Return a port of this node that is free now. vLLM binds it later, and takes none that is bound already."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        port: int = probe.getsockname()[1]
        return port
