"""The nodes over which an engine is divided, and how each of them notices that another one is gone.

    `FirstNode`: vLLM's engine, and its workers there      each other node: an `EngineFollower` with its workers
        `Followers`: listens                       ◀────       keeps a connection: a token, then at most a failure

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
from typing import Final, TypeVar

import psutil  # type: ignore[import-untyped]
from torch._C._distributed_c10d import TCPStore

from ppojob_trainer.engines.errors import EngineLostError, HostLostError, RolloutError
from ppojob_trainer.engines.network import listen

__all__ = ["EngineNode", "FirstNode", "Followers", "Loss", "connect_to_first"]

T = TypeVar("T")

LATER_S: Final = 1.0
"""Seconds after which no other cause of a failure is expected."""
_LONGEST_REASON: Final = 16_384
"""Bytes."""

_PROBES: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and number: a host that does not answer any more is noticed after 20 s."""


@dataclass(frozen=True)
class EngineNode:
    """One of the nodes of an engine.

    index: 0 has the engine itself. number: of nodes; each has as many of the GPUs. address: of node 0. port: of the
    store there, in which vLLM's workers meet. watch_port: at which `Followers` listens. token: that it expects.
    """

    index: int
    number: int
    address: str
    port: int
    watch_port: int
    token: str


class Loss:
    """Why an engine cannot be used any more, though its processes run; `error` is None while it can."""

    def __init__(self) -> None:
        self.error: EngineLostError | None = None
        self._is_known = asyncio.Event()

    def record(self, error: EngineLostError) -> None:
        """Record the reason, unless there is one."""
        self.error = self.error or error
        self._is_known.set()

    def check(self) -> None:
        """Raise the error if there is one, or another one like it: each has its own traceback."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    async def wait(self) -> None:
        """Wait until there is a reason."""
        await self._is_known.wait()

    async def cause_of(self, seen: RolloutError) -> RolloutError:
        """Return the reason, with what was `seen` of it. It may become known a moment later: gloo is quicker."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), LATER_S)
        return seen if self.error is None else type(self.error)(f"{self.error} ({seen})")


class Followers:
    """The connections of an engine's other nodes, on its first node."""

    def __init__(self, on_loss: Callable[[EngineLostError], None]) -> None:
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
        reason, lost = b"", f"the engine has lost its workers on the node with address {address}"
        try:
            while len(reason) < _LONGEST_REASON and (more := await reader.read(_LONGEST_REASON)):
                reason += more
            error = EngineLostError(f"{lost}: {reason.decode(errors='replace') or 'its process or its pod has ended'}")
        except ConnectionResetError:
            error = EngineLostError(f"{lost}: its process or its pod was killed")
        except OSError as failure:
            error = HostLostError(f"{lost}: its host does not answer any more ({failure})")
        writer.close()
        if self._server is not None:
            self._on_loss(error)

    def close(self) -> None:
        """End the connections, and so the workers of the other nodes."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in self._writers:
            writer.close()


class FirstNode:
    """The first node of an engine: where the others meet it, and whether they are still there.

    node: None if the engine has one node. lost: why the engine cannot be used any more.
    """

    def __init__(self) -> None:
        self.node: EngineNode | None = None
        self.lost = Loss()
        self._followers = Followers(self.lost.record)
        self._store: TCPStore | None = None

    async def meet(self, address: str, num_nodes: int, timeout_seconds: float) -> EngineNode:
        """Listen for the other nodes; return this one. Once: the nodes of an earlier call stay.

        Args:
            address: under which the others reach this one.
            timeout_seconds: for vLLM's workers to meet.
        """
        if self.node is not None:
            return self.node
        # vLLM's first worker would bind a port that is free now, minutes later: another process may take it meanwhile.
        self._store = listen(address, timeout_seconds)
        watch_port, token = await self._followers.listen(address), self._followers.token
        self.node = EngineNode(0, num_nodes, address, self._store.port, watch_port, token)
        return self.node

    async def unless_lost(self, starting: asyncio.Task[T]) -> T:
        """Return the result of vLLM's start; end its processes if another node is lost, for which it would wait.

        Raises:
            EngineLostError: with the reason.
        """
        lost = asyncio.create_task(self.lost.wait())
        await asyncio.wait([starting, lost], return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not starting.done():
            for process in psutil.Process().children(recursive=True):
                process.kill()
            await asyncio.wait([starting], timeout=LATER_S)
            self.lost.check()
        return await starting

    async def cause_of(self, seen: RolloutError) -> RolloutError:
        """Return why vLLM failed: `seen`, or the end of another node that led to it."""
        return seen if self.node is None else await self.lost.cause_of(seen)

    def close(self) -> None:
        """End the connections, and so the workers of the other nodes."""
        self._followers.close()


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
