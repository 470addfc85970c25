"""The HTTPS application that takes reports: limits, the way into `Intake`, and JSON answers.

It logs what it refuses, never headers or bodies: they carry tokens. aiohttp's access log stays off.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from ppojob_api.v1alpha1.progress import FETCH_PATH, MAX_REPORT_BYTES, REPORT_PATH, ProgressReply
from ppojob_operator import logs
from ppojob_operator.status_server import refusals
from ppojob_operator.status_server.intake import Intake
from ppojob_operator.status_server.metrics import OperatorMetrics
from ppojob_operator.status_server.refusals import Refusal

_LOG = logging.getLogger(__name__)
Take = Callable[[str, str, str | None, bytes], Awaitable[ProgressReply]]
"""A method of `Intake`."""


class ReportEndpoint:
    """`POST REPORT_PATH` and `POST FETCH_PATH`."""

    def __init__(
        self, intake: Intake, metrics: OperatorMetrics, *, body_limit_seconds: float, max_requests: int
    ) -> None:
        self._intake = intake
        self._metrics = metrics
        self._body_limit = body_limit_seconds
        self._max_requests = max_requests
        self._running = 0

    def application(self) -> web.Application:
        """Return the application; it knows these two paths."""
        application = web.Application(client_max_size=MAX_REPORT_BYTES)
        for path, take in ((REPORT_PATH, self._intake.receive), (FETCH_PATH, self._intake.receive_fetch)):
            application.router.add_post(path, functools.partial(self._handle, take))
        return application

    async def _handle(self, take: Take, request: web.Request) -> web.Response:
        path = request.match_info
        with logs.about(f"{path['namespace']}/{path['name']}"):
            return await self._answer(take, request)

    async def _answer(self, take: Take, request: web.Request) -> web.Response:
        self._running += 1
        try:
            reply = await self._receive(take, request)
        except Refusal as refusal:
            self._metrics.reports.labels(outcome=refusal.reason).inc()
            _LOG.info("%r: %d %s", request.path, refusal.status, refusal)
            answer = {"reason": refusal.reason, "message": refusal.message}
            return web.json_response(answer, status=refusal.status, headers=refusal.headers)
        finally:
            self._running -= 1
        self._metrics.reports.labels(outcome="Accepted").inc()
        return web.json_response(reply.to_wire())

    async def _receive(self, take: Take, request: web.Request) -> ProgressReply:
        if self._running > self._max_requests:
            raise refusals.unavailable("the operator is busy")
        body = await self._read(request)
        path = request.match_info
        return await take(path["namespace"], path["name"], request.headers.get("Authorization"), body)

    async def _read(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > MAX_REPORT_BYTES:
            raise refusals.too_large(MAX_REPORT_BYTES)
        try:
            async with asyncio.timeout(self._body_limit):
                return await request.read()
        except TimeoutError as error:
            raise refusals.slow_body(self._body_limit) from error
        except web.HTTPRequestEntityTooLarge as error:
            raise refusals.too_large(MAX_REPORT_BYTES) from error
