"""The HTTPS application that receives reports: limits, the way into `Intake`, and JSON answers.

The body is read only after the token in the header was checked, and counts against the limits of the token's job.

Refusals are logged, with a limit per reason. Headers and bodies are never logged, because they carry tokens;
aiohttp's access log is off.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from ppojob_api.v1alpha1.progress import FETCH_PATH, MAX_REPORT_BYTES, REPORT_PATH, ProgressReply
from ppojob_operator import logs
from ppojob_operator.status_server import refusals
from ppojob_operator.status_server.authentication import Caller
from ppojob_operator.status_server.intake import Intake
from ppojob_operator.status_server.limits import Connections, JobRequests, Rates
from ppojob_operator.status_server.metrics import OperatorMetrics
from ppojob_operator.status_server.refusals import Refusal

_LOG = logging.getLogger(__name__)
Take = Callable[[Caller, bytes], Awaitable[ProgressReply]]
"""A method of `Intake`."""
_LINES_PER_SECOND = 5.0
_LINES_AT_ONCE = 200
"""Log lines of refusals for the same reason; the metric counts all of them."""


class ReportEndpoint:
    """`POST REPORT_PATH` and `POST FETCH_PATH`."""

    def __init__(
        self,
        intake: Intake,
        metrics: OperatorMetrics,
        *,
        body_limit_seconds: float,
        connections: Connections,
        requests: JobRequests,
    ) -> None:
        """`connections` are those of this application's port."""
        self._intake = intake
        self._metrics = metrics
        self._body_limit = body_limit_seconds
        self._connections = connections
        self._requests = requests
        self._log_rates = Rates(_LINES_PER_SECOND, _LINES_AT_ONCE)

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
        try:
            reply = await self._receive(take, request)
        except Refusal as refusal:
            self._metrics.reports.labels(outcome=refusal.reason).inc()
            if self._log_rates.take(refusal.reason):
                _LOG.info("%r: %d %s", request.path, refusal.status, refusal)
            answer = {"reason": refusal.reason, "message": refusal.message}
            return web.json_response(answer, status=refusal.status, headers=refusal.headers)
        self._metrics.reports.labels(outcome="Accepted").inc()
        return web.json_response(reply.to_wire())

    async def _receive(self, take: Take, request: web.Request) -> ProgressReply:
        if (request.content_length or 0) > MAX_REPORT_BYTES:
            raise refusals.too_large(MAX_REPORT_BYTES)
        path, address = request.match_info, request.get_extra_info("peername")
        if not address:
            raise refusals.disconnected()
        authorization = request.headers.get("Authorization")
        caller = await self._intake.identify(authorization, path["namespace"], path["name"], address[0])
        with self._requests.running(caller.key):
            self._connections.protect(address)
            return await take(caller, await self._read(request))

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._body_limit):
                return await request.read()
        except TimeoutError as error:
            raise refusals.slow_body(self._body_limit) from error
        except ConnectionError as error:
            raise refusals.disconnected() from error
        except web.HTTPRequestEntityTooLarge as error:
            raise refusals.too_large(MAX_REPORT_BYTES) from error
