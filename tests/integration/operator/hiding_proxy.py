"""A way to the API server that can be disturbed: a group hidden, calls refused, the line cut, watches frozen.

Everything else goes through unchanged, watches too, and is written down as the rights that it takes. It listens on this
machine only and speaks plain HTTP.
"""

import asyncio
import ssl
import threading
from types import TracebackType
from typing import NamedTuple

import aiohttp
from aiohttp import web

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_LIMIT_SECONDS = 240.0
"""Of the start and of the end of the proxy's thread, on a busy machine."""
_HOP_BY_HOP = {"connection", "host", "transfer-encoding", "content-length", "content-encoding"}


class HidingProxy:
    """The proxy, in a separate thread."""

    def __init__(self, server: str, ca_pem: str, hidden: str = "") -> None:
        """`hidden` is the API group that is absent while `is_hiding`."""
        self._server = server
        self._hidden = hidden
        self._answering: set[asyncio.Task[object]] = set()
        self.refusals: dict[str, int] = {}
        """Method -> status with which its calls are answered in place of the API server."""
        self.are_watches_frozen = False
        """Watches stay open, and nothing comes any more."""
        self._used: set[Right] = set()
        self._is_cut = False
        self._context = ssl.create_default_context(cadata=ca_pem)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hiding proxy", daemon=True)
        self.is_hiding = bool(hidden)
        self.url = ""

    def __enter__(self) -> "HidingProxy":
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_LIMIT_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_LIMIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_SECONDS)
        self._loop.close()

    async def _start(self) -> str:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=16 * 2**20)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        # Watches are open for as long as they are read.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    @property
    def used(self) -> "frozenset[Right]":
        """What was asked of the API server so far: a copy, because the proxy's thread adds to it."""
        return frozenset(self._used)

    def forget_used(self) -> None:
        """Forget what was asked until now."""
        self._used.clear()

    def cut(self) -> None:
        """Close every connection, and each new one at once."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._answering])

    def restore(self) -> None:
        """Let everything through again."""
        self._is_cut = self.are_watches_frozen = self.is_hiding = False
        self.refusals.clear()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self._is_cut:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        if self.is_hiding and request.path.startswith(f"/apis/{self._hidden}"):
            words = {"kind": "Status", "message": "the server could not find the requested resource", "code": 404}
            return web.json_response(words, status=404)
        if (status := self.refusals.get(request.method)) is not None:
            return web.json_response({"kind": "Status", "message": "said by the proxy", "code": status}, status=status)
        self._used.add(right_of(request))
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            return await self._pass_on(request)
        except ConnectionResetError:  # Who asked is gone.
            return web.Response()
        finally:
            self._answering.discard(task)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        body = await request.read()
        async with self._session.request(
            request.method, self._server + str(request.rel_url), headers=headers, data=body or None
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                while self.are_watches_frozen and "watch" in request.query:
                    await asyncio.sleep(0.1)
                await response.write(chunk)
            return response


class Right(NamedTuple):
    """What a rule of a role allows."""

    verb: str
    group: str
    resource: str
    """With the subresource, if any, as roles write it."""


def right_of(request: web.Request) -> Right:
    """Return the right that a request takes, by the API server's own reading of paths."""
    parts = request.path.strip("/").split("/")
    if parts[0] not in ("api", "apis"):
        return Right(_VERBS.get(request.method, "get"), "", request.path)
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    resource = "/".join([*rest[:1], *rest[2:]]) or request.path
    if request.method == "GET":
        verb = "get" if len(rest) > 1 else "watch" if "watch" in request.query else "list"
    else:
        verb = _VERBS[request.method]
    return Right(verb, group, resource)
