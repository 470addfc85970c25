"""Notifications over real HTTP: what arrives, what is tried again, what is given up, and what no log has."""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ppojob_api.v1alpha1.notification import NotificationsStatus, PendingNotification
from ppojob_operator.api_server import ApiUnavailable
from ppojob_operator.notifications import Backoff, Hooks, Notifier, Receiver
from ppojob_operator.notifications import notifier as notifier_module
from ppojob_operator.notifications.cloud_event import CONTENT_TYPE
from ppojob_operator.notifications.receiver import Outcome
from ppojob_operator.plan import Job, JobKey, Plan
from ppojob_operator.reading import read_job
from ppojob_operator.settings import Settings
from ppojob_operator.status_server import certificates
from tests.ports import server_port
from tests.unit.operator.loop.memory_cluster import GOOD, MemoryCluster, job_of, make_loop

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
        configured = Settings(**{"notification_url": self.url, "notification_timeout": 0.5, **settings})
        hooks = Hooks(guard, self.requeued.append, lambda kind, result: self.counts.append((kind, result)))
        stop, made = asyncio.Event(), Notifier(configured, Receiver(configured), hooks, backoff)
        running = asyncio.create_task(made.run(stop))
        try:
            yield made
        finally:
            stop.set()
            await asyncio.wait_for(running, 10)

    async def settled(self, count: int = 1) -> None:
        """Wait until this many notifications are accepted or dropped."""
        await eventually(lambda: len(self.requeued) >= count)


async def eventually(is_so: Callable[[], bool], limit: float = 5.0) -> None:
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


async def test_the_receiver_gets_a_cloud_event() -> None:
    async with receiving(202) as site, site.notifier(notification_cluster="training") as notifier:
        notification = pending()
        notifier.send(job_with(notification), Plan())
        await site.settled()

    [(headers, event)] = site.requests
    assert headers["Content-Type"] == CONTENT_TYPE == "application/cloudevents+json; charset=utf-8"
    assert "Authorization" not in headers
    assert event == {
        "specversion": "1.0",
        "id": "uid-good-1",
        "source": "/clusters/training/namespaces/ns/ppojobs/uid-good",
        "type": "dev.ppojob.job.failed",
        "subject": "ns/good",
        "time": notification.time,
        "datacontenttype": "application/json",
        "data": {
            "cluster": "training",
            "namespace": "ns",
            "name": "good",
            "uid": "uid-good",
            "number": 1,
            "phase": "Failed",
            "reason": "NonFinite",
            "message": "Verlust ist ∞",
            "attempt": 2,
            "step": 7,
            "totalSteps": 8,
            "reward": 0.25,
            "checkpoint": "/data/step-5",
        },
    }
    assert site.counts == [("failed", "sent")]


@pytest.mark.parametrize("status", [500, 503, 429, 408, 425, 401, 403])
async def test_a_refusal_that_may_pass_is_tried_again_with_the_same_id(status: int) -> None:
    async with receiving(status, status, 200) as site, site.notifier() as notifier:
        notifier.send(job_with(pending()), Plan())
        await site.settled()

    assert site.ids == ["uid-good-1"] * 3
    assert site.requests[0][1] == site.requests[2][1]
    assert site.counts == [("failed", "retried"), ("failed", "retried"), ("failed", "sent")]


@pytest.mark.parametrize("status", [400, 404, 410, 301, 302, 307, 308])
async def test_any_other_refusal_and_a_redirect_are_final(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": f"{TOKEN_PATH}?elsewhere"})

    async with receiving(refuse) as site, site.notifier() as notifier:
        notifier.send(job_with(pending()), Plan())
        await site.settled()

    assert len(site.requests) == 1, "neither repeated nor followed"
    assert site.counts == [("failed", "refused")]
    assert f"notification uid-good-1 (failed) is dropped: http://127.0.0.1:{site.port} answered {status}" in caplog.text


@pytest.mark.parametrize("is_date", [False, True])
async def test_the_receiver_says_when_to_come_again(is_date: bool) -> None:
    async def busy(request: web.Request) -> web.Response:
        # A date has whole seconds, so two seconds are at least one.
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return web.Response(status=429, headers={"Retry-After": date if is_date else "1"})

    async with receiving(busy, 200) as site, site.notifier() as notifier:
        began = time.monotonic()
        notifier.send(job_with(pending()), Plan())
        await site.settled()
        seconds = time.monotonic() - began

    assert seconds >= 0.95
    assert site.counts[-1] == ("failed", "sent")


async def test_nobody_is_kept_waiting_longer_than_the_limit() -> None:
    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "86400"})

    async with receiving(busy, 200) as site, site.notifier(replace(FAST, longest_asked=0.1)) as notifier:
        notifier.send(job_with(pending()), Plan())
        await site.settled()

    assert site.counts[-1] == ("failed", "sent")


def test_pauses_grow_to_a_limit_and_differ() -> None:
    backoff = Backoff(first=1, longest=300)

    pauses = {tries: [backoff.pause(tries, None) for _ in range(200)] for tries in (1, 2, 3, 9, 10, 5000)}

    for tries, limit in {1: 1, 2: 2, 3: 4, 9: 256, 10: 300, 5000: 300}.items():
        assert limit / 2 <= min(pauses[tries]) < max(pauses[tries]) <= limit
        assert len(set(pauses[tries])) > 100


async def test_an_endless_body_is_not_read() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=200)
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async with receiving(endless) as site, site.notifier() as notifier:
        notifier.send(job_with(pending()), Plan())
        await site.settled()

    assert site.counts == [("failed", "sent")]


async def test_a_receiver_that_says_nothing_is_left_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with receiving(silent, 200) as site, site.notifier(notification_timeout=0.1) as notifier:
        notifier.send(job_with(pending()), Plan())
        await site.settled()

    assert site.counts == [("failed", "retried"), ("failed", "sent")]
    assert "no answer within 0.1 s" in caplog.text


async def test_a_dead_address_is_given_up_when_the_notification_is_too_old(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(server_port())

    async with site.notifier(notification_give_up_after=60) as notifier:
        notifier.send(job_with(pending(age=58.5)), Plan())
        await site.settled()

    assert site.counts[0] == ("failed", "retried")
    assert site.counts[-1] == ("failed", "expired")
    assert f"is dropped: http://127.0.0.1:{site.port}: ClientConnectorError" in caplog.text


async def test_an_old_notification_is_tried_once_at_least() -> None:
    async with receiving(200) as site, site.notifier(notification_give_up_after=60) as notifier:
        notifier.send(job_with(pending(age=1e6)), Plan())
        await site.settled()

    assert site.counts == [("failed", "sent")]


async def test_the_notifications_of_a_job_keep_their_order_and_other_jobs_do_not_wait() -> None:
    async def good_is_refused(request: web.Request) -> web.Response:
        event = json.loads(await request.read())
        is_first = event["id"] == "uid-good-1" and len(site.requests) < 6
        return web.Response(status=503 if is_first else 200)

    other = JobKey("ns", "other")
    async with receiving(good_is_refused) as site, site.notifier() as notifier:
        notifier.send(job_with(pending(1), pending(2)), Plan())
        notifier.send(job_with(pending(1), key=other), Plan())
        await site.settled(3)

    accepted = [each for each in site.ids if each != "uid-good-1"]
    assert accepted == ["uid-other-1", "uid-good-2"]
    assert site.ids[-1] == "uid-good-2"
    assert site.requeued == [other, GOOD, GOOD]


async def test_what_is_queued_or_settled_is_not_sent_again() -> None:
    job = job_with(pending())
    async with receiving(200) as site, site.notifier() as notifier:
        notifier.send(job, Plan())
        notifier.send(job, Plan())
        await site.settled()
        notifier.send(job, Plan())

        plan = notifier.add(job, Plan(), datetime.now(UTC))
        await asyncio.sleep(0.1)

    assert site.ids == ["uid-good-1"]
    assert plan.status is not None
    assert plan.status["notifications"]["pending"] == []


async def test_what_does_not_fit_into_the_queue_stays_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "MAX_QUEUED", 2)
    job = job_with(*(pending(number) for number in (1, 2, 3)))
    async with receiving(200) as site, site.notifier() as notifier:
        notifier.send(job, Plan())
        await site.settled(2)
        await asyncio.sleep(0.1)
        assert site.ids == ["uid-good-1", "uid-good-2"]

        plan = notifier.add(job, Plan(), datetime.now(UTC))
        notifier.send(job, plan)
        await site.settled(3)

    assert site.ids == [f"uid-good-{number}" for number in (1, 2, 3)]


async def test_what_the_status_has_no_room_for_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    before, after = job_with(pending(1), pending(2)), NotificationsStatus(number=2, pending=[pending(2)])
    async with receiving(200) as site, site.notifier() as notifier:
        notifier.send(before, Plan(status={"notifications": after.to_wire()}))
        await site.settled()

    assert ("failed", "displaced") in site.counts
    assert "uid-good-1 (failed) is dropped: too many" in caplog.text
    assert site.ids == ["uid-good-2"]


async def test_the_secret_is_read_at_each_try_and_is_in_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "authorization").write_text("Bearer 0ld-t0ken\n")

    async def renew(request: web.Request) -> web.Response:
        (tmp_path / "authorization").write_text(f"{SECRET}\n")
        return web.Response(status=401, text=f"not {request.headers['Authorization']}")

    async with receiving(renew, 500, 400) as site:
        (tmp_path / "url").write_text(f"{site.url}\n")
        async with site.notifier(notification_url="", notification_folder=str(tmp_path)) as notifier:
            notifier.send(job_with(pending()), Plan())
            await site.settled()

    sent = [headers["Authorization"] for headers, _ in site.requests]
    assert sent == ["Bearer 0ld-t0ken", SECRET, SECRET]
    assert "answered 401" in caplog.text
    assert "is dropped" in caplog.text
    for secret in ("0ld-t0ken", SECRET, "s3cret-path"):
        assert secret not in caplog.text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "there is no address: set notifications.url"),
        ({"url": "ftp://s3cret"}, "it must begin with http:// or https://"),
        ({"url": "https://user:s3cret@host/"}, "it must have no user or password"),
        ({"url": "https://host/", "authorization": "Bearer s3cret\r\nX-Other: 1"}, "not one line of printable ASCII"),
        ({"url": "https://host/", "authorization": "Bearer s3crét"}, "not one line of printable ASCII"),
        ({"url": "https://host/", "ca.crt": "s3cret"}, "has no certificates as PEM"),
        ({"url": "https://[s3cret/"}, "its host or port is not valid"),
    ],
)
async def test_a_secret_that_cannot_be_used_is_named_by_its_key_alone(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    outcome = await Receiver(Settings(notification_folder=str(tmp_path))).post(b"{}")

    assert words in outcome.problem
    assert "s3cr" not in outcome.problem
    assert not outcome.is_final, "the Secret can be corrected"


async def test_an_answer_that_is_no_http_says_nothing_of_the_address() -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"s3cret garbage\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        settings = Settings(notification_url=f"http://127.0.0.1:{port}/s3cret-path")
        outcome = await Receiver(settings).post(b"{}")

    assert outcome.problem.startswith(f"http://127.0.0.1:{port}: ")
    assert "s3cret" not in outcome.problem


async def test_a_certificate_authority_of_the_secret_is_the_only_one_that_is_trusted(tmp_path: Path) -> None:
    ours, other = (certificates.make(["127.0.0.1"], datetime.now(UTC)) for _ in range(2))
    (tmp_path / "server").write_text(ours.certificate + ours.key)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "server")

    async with receiving(200, tls=tls) as site:
        settings = Settings(
            notification_url=site.url.replace("http:", "https:"), notification_folder=str(tmp_path / "secret")
        )
        (tmp_path / "secret").mkdir()
        unknown = await Receiver(settings).post(b"{}")
        (tmp_path / "secret" / "ca.crt").write_text(other.authorities)
        wrong = await Receiver(settings).post(b"{}")
        (tmp_path / "secret" / "ca.crt").write_text(ours.authorities)
        right = await Receiver(settings).post(b"{}")

    assert right == Outcome()
    for outcome in (unknown, wrong):
        assert "certificate verify failed" in outcome.problem
        assert not outcome.is_final
    assert len(site.requests) == 1


async def test_only_the_leader_sends() -> None:
    def follows() -> None:
        raise ApiUnavailable("this replica is not the leader")

    async with receiving(200) as site, site.notifier(guard=follows) as notifier:
        notifier.send(job_with(pending()), Plan())
        await asyncio.sleep(0.2)

    assert site.requests == []
    assert site.requeued == []


async def test_a_stop_lets_requests_end_and_does_not_wait_for_retries() -> None:
    arrived = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        arrived.set()
        await asyncio.sleep(0.3)
        return web.Response(status=200)

    async with receiving(slow) as site:
        dead = JobKey("ns", "dead")
        async with site.notifier(Backoff(first=1000, longest=1000)) as notifier:
            notifier.send(job_with(pending(1)), Plan())
            await arrived.wait()
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert site.counts == [("failed", "sent")]

        nobody = Site(server_port())
        async with nobody.notifier(Backoff(first=1000, longest=1000)) as notifier:
            notifier.send(job_with(pending(), key=dead), Plan())
            await eventually(lambda: bool(nobody.counts))
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert nobody.requeued == [], "it stays in the status"


async def test_a_stop_ends_a_request_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "_FLUSH_SECONDS", 0.2)
    arrived = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        arrived.set()
        await asyncio.sleep(30)
        raise AssertionError

    async with receiving(silent) as site:
        async with site.notifier(notification_timeout=30) as notifier:
            notifier.send(job_with(pending()), Plan())
            await arrived.wait()
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert site.requeued == []


async def test_a_bug_of_one_request_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Receiver):
        async def post(self, body: bytes) -> Outcome:
            raise KeyError("s3cret")

    configured = Settings(notification_url="http://s3cret")
    stop, notifier = asyncio.Event(), Notifier(configured, Broken(configured))
    running = asyncio.create_task(notifier.run(stop))
    notifier.send(job_with(pending()), Plan())
    await asyncio.sleep(0.05)
    assert not running.done()
    stop.set()
    await running

    assert "bug in the operator: KeyError" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_transition_reaches_the_receiver_once_and_leaves_the_status() -> None:
    cluster = MemoryCluster(GOOD)
    cluster.jobs[GOOD]["spec"] = {**cluster.jobs[GOOD]["spec"], "pools": []}
    async with receiving(200) as site, site.notifier() as notifier:
        loop = make_loop(cluster, notifier=notifier)
        await loop.reconcile(GOOD)
        assert [each["type"] for each in cluster.jobs[GOOD]["status"]["notifications"]["pending"]] == ["attention"]
        await site.settled()
        await loop.reconcile(GOOD)
        await loop.reconcile(GOOD)

    assert cluster.jobs[GOOD]["status"]["notifications"]["pending"] == []
    [(_, event)] = site.requests
    assert (event["type"], event["data"]["reason"]) == ("dev.ppojob.job.attention", "InvalidSpec")


async def test_another_operator_sends_what_the_last_one_left() -> None:
    cluster = MemoryCluster(GOOD)
    cluster.jobs[GOOD]["spec"] = {**cluster.jobs[GOOD]["spec"], "pools": []}
    nobody = Site(server_port())
    async with nobody.notifier() as notifier:
        await make_loop(cluster, notifier=notifier).reconcile(GOOD)

    async with receiving(200) as site, site.notifier() as notifier:
        await make_loop(cluster, notifier=notifier).reconcile(GOOD)
        await site.settled()

    assert site.ids == ["uid-good-1"]


async def test_a_status_that_is_not_written_notifies_nobody() -> None:
    cluster = MemoryCluster(GOOD)
    cluster.jobs[GOOD]["spec"] = {**cluster.jobs[GOOD]["spec"], "pools": []}
    cluster.errors["write_status", GOOD] = ApiUnavailable("503")
    async with receiving(200) as site, site.notifier() as notifier:
        with pytest.raises(ApiUnavailable):
            await make_loop(cluster, notifier=notifier).reconcile(GOOD)
        await asyncio.sleep(0.1)

    assert site.requests == []
