"""A way to the API server on which a whole API group can be hidden, as if nobody had installed it.

Everything else goes through unchanged, watches too. It listens on this machine only and speaks plain HTTP.
"""

import asyncio
import ssl
import threading
from types import TracebackType

import aiohttp
from aiohttp import web

_HOP_BY_HOP = {"connection", "host", "transfer-encoding", "content-length", "content-encoding"}


class HidingProxy:
    """The proxy, in a thread of its own."""

    def __init__(self, server: str, ca_pem: str, hidden: str) -> None:
        """`hidden` is the API group that is not there while `is_hiding`."""
        self._server = server
        self._hidden = hidden
        self._context = ssl.create_default_context(cadata=ca_pem)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hiding proxy", daemon=True)
        self.is_hiding = True
        self.url = ""

    def __enter__(self) -> "HidingProxy":
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
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

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self.is_hiding and request.path.startswith(f"/apis/{self._hidden}"):
            words = {"kind": "Status", "message": "the server could not find the requested resource", "code": 404}
            return web.json_response(words, status=404)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        body = await request.read()
        async with self._session.request(
            request.method, self._server + str(request.rel_url), headers=headers, data=body or None
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response
