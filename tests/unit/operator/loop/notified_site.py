"""A receiver over real HTTP, the notifier that sends to it, and notifications, for the tests of notifications."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from ppojob_api.v1alpha1.notification import NotificationsStatus, PendingNotification
from ppojob_operator.notifications import Backoff, Hooks, Notifier, Receiver
from ppojob_operator.plan import Job, JobKey
from ppojob_operator.reading import read_job
from ppojob_operator.settings import Settings
from tests.unit.operator.loop.memory_cluster import GOOD, job_of

FAST = Backoff(first=0.01, longest=0.05, longest_asked=1.5)
SECRET = "Bearer aN-aUtH-t0ken"
TOKEN_PATH = "/services/s3cret-path"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def pending(number: int = 1, kind: str = "failed", age: float = 0.0) -> PendingNotification:
    """Return a notification that happened `age` seconds ago."""
    moment = datetime.now(UTC) - timedelta(seconds=age)
    return PendingNotification(
        number=number,
        type=kind,
        reason="NonFinite",
        message="Verlust ist ∞",
        phase="Failed",
        attempt=2,
        step=7,
        total_steps=8,
        reward="0.25",
        checkpoint="/data/step-5",
        time=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def job_with(*notifications: PendingNotification, key: JobKey = GOOD) -> Job:
    """Return a job whose status has these notifications."""
    job = read_job(job_of(key))
    number = max((each.number for each in notifications), default=0)
    status = NotificationsStatus(number=number, pending=list(notifications))
    return replace(job, status=job.status.model_copy(update={"notifications": status}))


@dataclass
class Site:
    """A receiver, and the notifier that sends to it."""

    port: int
    requests: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    counts: list[tuple[str, str]] = field(default_factory=list)
    requeued: list[JobKey] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        """The ids that arrived."""
        return [event["id"] for _, event in self.requests]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{TOKEN_PATH}"

    @asynccontextmanager
    async def notifier(
        self, backoff: Backoff = FAST, guard: Callable[[], None] = lambda: None, **settings: Any
    ) -> AsyncIterator[Notifier]:
        """Run a notifier; at the end it stops."""
        configured = Settings(**{"notification_url": self.url, "notification_timeout": 30, **settings})
        hooks = Hooks(guard, self.requeued.append, lambda kind, result: self.counts.append((kind, result)))
        stop, made = asyncio.Event(), Notifier(configured, Receiver(configured), hooks, backoff)
        running = asyncio.create_task(made.run(stop))
        try:
            yield made
        finally:
            stop.set()
            await asyncio.wait_for(running, 60)

    async def settled(self, count: int = 1) -> None:
        """Wait until this many notifications are accepted or dropped."""
        await eventually(lambda: len(self.requeued) >= count)


async def eventually(is_so: Callable[[], bool], limit: float = 60.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@asynccontextmanager
async def receiving(*answers: Handler | int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    """Serve a receiver whose answers come in this order; the last one is repeated."""
    site, left = Site(0), list(answers)

    async def handle(request: web.Request) -> web.StreamResponse:
        site.requests.append((dict(request.headers), json.loads(await request.read())))
        answer = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=answer) if isinstance(answer, int) else await answer(request)

    application = web.Application()
    application.router.add_post(TOKEN_PATH, handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    site.port = runner.addresses[0][1]
    try:
        yield site
    finally:
        await runner.cleanup()
