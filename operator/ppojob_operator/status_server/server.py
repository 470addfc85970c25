"""The status server as one thing: HTTPS for reports, HTTP for probes, certificates, and the writer behind them.

`main.py` makes it, awaits `prepare`, and runs `run` beside Kopf in the same loop. Kopf cancels tasks that are younger
than itself when it ends: create the task of `run` before Kopf's, and stop this server first.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from aiohttp import web

from ppojob_api.v1alpha1.progress import REPORT_PATH
from ppojob_api.v1alpha1.versions import own_version
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.status_server.authentication import Authenticator, TokenReviews
from ppojob_operator.status_server.certificate_store import CertificateStore, FolderSource, SecretSource
from ppojob_operator.status_server.certificates import CertificateError
from ppojob_operator.status_server.endpoint import ReportEndpoint
from ppojob_operator.status_server.health import Health
from ppojob_operator.status_server.intake import Intake, utc_now
from ppojob_operator.status_server.limits import Connections, JobRequests, Listener, close_after_answer
from ppojob_operator.status_server.metrics import OperatorMetrics
from ppojob_operator.status_server.ports import ProgressPort, SecretPort
from ppojob_operator.status_server.probes import probe_application
from ppojob_operator.status_server.settings import StatusServerSettings
from ppojob_operator.status_server.writer import ProgressWriter

_PREPARE_SECONDS = 60.0
_SHUTDOWN_SECONDS = 5.0
_FLUSH_SECONDS = 10.0
_WRITER_HEARTBEAT_SECONDS = 60.0
_LINGERING_SECONDS = 2.0
"""How long a refused body is still read, so that its sender gets the answer."""
_REQUEST_SECONDS = 30.0
"""Longest time of a connection to the webhook and the probes, whose senders show no token."""


class StatusServer:
    """Receives the trainers' reports."""

    def __init__(
        self,
        settings: StatusServerSettings,
        *,
        port: ProgressPort,
        secrets: SecretPort,
        service_account_name: Callable[[str], str],
        fetch_job_name: Callable[[str], str],
        health: Health,
        metrics: OperatorMetrics,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._settings = settings
        self._certificates = _certificate_store(settings, secrets, clock)
        heartbeat = health.heartbeat("status writer", _WRITER_HEARTBEAT_SECONDS)
        self._writer = ProgressWriter(
            port, metrics, interval_seconds=settings.write_interval_seconds, beat=heartbeat.beat
        )
        reviews = TokenReviews(port, cache_seconds=settings.token_cache_seconds)
        limit = settings.request_timeout_seconds
        intake = Intake(
            port,
            Authenticator(port, reviews, service_account_name, fetch_job_name),
            self._writer,
            write_limit_seconds=limit,
            version=own_version(),
            clock=clock,
        )
        self._count_closed = metrics.count_closed_connection
        connections = self._connections()
        endpoint = ReportEndpoint(
            intake,
            metrics,
            body_limit_seconds=limit,
            connections=connections,
            requests=JobRequests(settings.requests),
        )
        self._reports = (settings.port, endpoint.application(), connections)
        self._probes = (settings.probe_port, probe_application(health, metrics), self._connections(_REQUEST_SECONDS))
        self._beside: list[tuple[int, web.Application, Connections]] = []
        self._is_open = False
        health.ready_when("status server", lambda: None if self._is_open else "takes no reports")

    async def prepare(self) -> None:
        """Make or read the certificates.

        Raises:
            CertificateError: with what is wrong and what to do.
        """
        try:
            async with asyncio.timeout(_PREPARE_SECONDS):
                await self._load_certificates()
        except TimeoutError as error:
            raise CertificateError(
                f"the certificates of the status server could not be read within {_PREPARE_SECONDS:g} s: "
                "the API server does not answer"
            ) from error
        except ApiRefused as error:
            secret = f"{self._settings.namespace}/{self._settings.certificate_secret}"
            raise CertificateError(
                f"the operator may not use Secret {secret}: give its service account get and update ({error})"
            ) from error

    def serve_beside(self, port: int, application: web.Application) -> None:
        """Serve another application with the same certificates on a separate port: other clients may reach it."""
        self._beside.append((port, application, self._connections(_REQUEST_SECONDS)))

    def ca_bundle(self) -> str:
        """Return the authorities that trainers must trust, in PEM; a renewal changes it, so read it at each use."""
        return self._certificates.ca_bundle

    def report_url(self, namespace: str, name: str) -> str:
        """Return the address to which the trainer of a job reports."""
        return self._settings.base_url + REPORT_PATH.format(namespace=namespace, name=name)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then finish the requests in work and write every report that is kept.

        Raises:
            OSError: a port is taken.
            RuntimeError: a loop of the server ended by itself; the process should end too.
        """
        async with AsyncExitStack() as stack:
            # Left in the opposite order: requests end while the writer still writes, probes answer to the last.
            await stack.enter_async_context(self._serving(*self._probes, None))
            loops = await stack.enter_async_context(self._loops())
            for served in [self._reports, *self._beside]:
                await stack.enter_async_context(self._serving(*served, self._certificates.context))
            self._is_open = True
            try:
                await _wait(stop, loops)
            finally:
                self._is_open = False

    async def _load_certificates(self) -> None:
        while True:
            try:
                return await self._certificates.load()
            except ApiUnavailable:
                await asyncio.sleep(1)

    def _connections(self, seconds: float | None = None) -> Connections:
        limits = self._settings.connections
        return Connections(limits if seconds is None else replace(limits, seconds=seconds), self._count_closed)

    @asynccontextmanager
    async def _serving(
        self, port: int, application: web.Application, connections: Connections, context: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        """Serve an application, one request per connection; at the end requests in work may finish."""
        application.on_response_prepare.append(close_after_answer)
        runner = web.AppRunner(
            application,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            lingering_time=_LINGERING_SECONDS,
            auto_decompress=False,
        )
        await runner.setup()
        try:
            await Listener(runner, self._settings.host, port, context, connections).start()
            yield
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def _loops(self) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Run the writer and the renewal of certificates; write the remaining reports at the end."""
        seconds = self._settings.certificate_check_seconds
        tasks = [
            asyncio.create_task(self._writer.run(), name="status writer"),
            asyncio.create_task(self._certificates.keep_fresh(seconds), name="certificates"),
        ]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._writer.flush(_FLUSH_SECONDS)


def _certificate_store(
    settings: StatusServerSettings, secrets: SecretPort, clock: Callable[[], datetime]
) -> CertificateStore:
    if settings.certificate_folder is not None:
        return CertificateStore(FolderSource(settings.certificate_folder, clock))
    return CertificateStore(
        SecretSource(secrets, settings.namespace, settings.certificate_secret, settings.server_names, clock)
    )


async def _wait(stop: asyncio.Event, loops: list[asyncio.Task[None]]) -> None:
    """Wait for `stop`; a loop that ends before is an error."""
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait(), name="stop of the status server")
    try:
        await asyncio.wait({stopping, *loops}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    for task in loops:
        if task.done():
            cause = None if task.cancelled() else task.exception()
            raise RuntimeError(f"the loop {task.get_name()!r} of the status server ended by itself") from cause
