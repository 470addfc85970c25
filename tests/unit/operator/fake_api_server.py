"""A client of a fake API server: an HTTP server in this process."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from ppojob_operator.api_server import ApiServer


@asynccontextmanager
async def connected(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[ApiServer]:
    """Send each request to `handle`."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(application) as server:
        configuration = Configuration()
        configuration.host = str(server.make_url("")).rstrip("/")
        async with ApiClient(configuration) as client:
            yield ApiServer(client, timeout=120.0)
