"""A TCP port of an aiohttp application with limits on its connections, from before the TLS handshake.

`server.py` makes one for each port. aiohttp reads the requests; this only decides which connections it gets:
`connections.py` has the rules. A source beyond its limits costs no handshake.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from ppojob_operator.status_server.limits.connections import Address, Connections

_BACKLOG = 512
"""Connections that the kernel keeps until they are accepted; it drops more, and their clients retry after a second."""
_SHUTDOWN_SECONDS = 5.0
"""How long a client may take to answer the end of TLS; asyncio's default is 30 s."""


class Listener(web.BaseSite):
    """Listens on a port and passes connections to the runner's application."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None, connections: Connections
    ) -> None:
        """Listen with TLS if there is a context."""
        super().__init__(runner, ssl_context=context, backlog=_BACKLOG)
        self._host = host
        self._port = port
        self._connections = connections
        self._handshakes = Handshakes(context, connections.seconds)

    @property
    def name(self) -> str:
        """The address, for aiohttp's messages."""
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        await super().start()
        make_handler = cast("Callable[[], asyncio.Protocol]", self._runner.server)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(make_handler, self._connections, self._handshakes),
            self._host,
            self._port,
            backlog=self._backlog,
        )

    async def stop(self) -> None:
        """Listen no longer, and end handshakes; the runner ends the requests."""
        await super().stop()
        self._handshakes.stop()


class Handshakes:
    """The TLS handshakes in work."""

    def __init__(self, context: ssl.SSLContext | None, seconds: float) -> None:
        self._context = context
        self._seconds = seconds
        self._running: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def begin(self, raw: asyncio.Transport, protocol: "_Connection") -> None:
        """Begin the handshake of a new connection, if the port has TLS; then the protocol's `begin` is called."""
        if self._is_stopped:
            raw.abort()
        elif self._context is None:
            protocol.begin(raw)
        else:
            task = asyncio.get_running_loop().create_task(self._run(raw, protocol, self._context))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            # A task that is cancelled before it has begun closes nothing itself.
            task.add_done_callback(lambda task: raw.abort() if task.cancelled() else None)

    def stop(self) -> None:
        """End all handshakes, and begin no more."""
        self._is_stopped = True
        for task in self._running:
            task.cancel()

    async def _run(self, raw: asyncio.Transport, protocol: "_Connection", context: ssl.SSLContext) -> None:
        if raw.is_closing():
            return
        with contextlib.suppress(OSError):
            tls = await asyncio.get_running_loop().start_tls(
                raw,
                protocol,
                context,
                server_side=True,
                ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
            # asyncio returns None if the connection was aborted meanwhile.
            if tls is not None:
                protocol.begin(tls)
                return
        raw.abort()
        protocol.connection_lost(None)


class _Connection(asyncio.Protocol):
    """One connection: counted, then the TLS handshake, then everything goes to aiohttp's protocol."""

    def __init__(
        self, make_handler: Callable[[], asyncio.Protocol], connections: Connections, handshakes: Handshakes
    ) -> None:
        self._make_handler = make_handler
        self._connections = connections
        self._handshakes = handshakes
        self._handler: asyncio.Protocol | None = None
        self._address: Address | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_lost = False
        self._early: list[bytes] = []
        """Data that came with the end of the handshake, before its task continued."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; called once, before the handshake."""
        raw = cast(asyncio.Transport, transport)
        address = raw.get_extra_info("peername")
        if not address or not self._connections.open(address, raw.abort):
            raw.abort()
            return
        self._address = address
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._connections.seconds, self._connections.expire, address)
        self._handshakes.begin(raw, self)

    def begin(self, transport: asyncio.Transport) -> None:
        """Let aiohttp read requests from here on."""
        if self._is_lost:
            return
        self._handler = self._make_handler()
        self._handler.connection_made(transport)
        for data in self._early:
            self._handler.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        """Pass data on."""
        if self._handler is None:
            self._early.append(data)
        else:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the end of the data on."""
        return None if self._handler is None else self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; may be called twice if the handshake failed."""
        self._is_lost = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._address is not None:
            self._connections.closed(self._address)
            self._address = None
        if self._handler is not None:
            self._handler.connection_lost(exc)
            self._handler = None

    def pause_writing(self) -> None:
        """Pass it on."""
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        if self._handler is not None:
            self._handler.resume_writing()


async def close_after_answer(_: Any, response: web.StreamResponse) -> None:
    """End the connection after each answer: senders open a new one for each request, and none may keep it idle."""
    response.force_close()
    # aiohttp has already decided about this header.
    response.headers["Connection"] = "close"
