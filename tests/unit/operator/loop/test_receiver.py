"""The client of the receiver: what arrives, which answers are final, what it trusts, and what no log has."""

import asyncio
import logging
import ssl
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from aiohttp import web

from ppojob_operator.notifications import Receiver
from ppojob_operator.notifications.cloud_event import CONTENT_TYPE
from ppojob_operator.notifications.receiver import Outcome
from ppojob_operator.plan import Plan
from ppojob_operator.settings import Settings
from ppojob_operator.status_server import certificates
from tests.unit.operator.loop.notified_site import (
    FAST,
    SECRET,
    TOKEN_PATH,
    job_with,
    pending,
    receiving,
)


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

    async with receiving(silent, 200) as site, site.notifier(notification_timeout=0.5) as notifier:
        notifier.send(job_with(pending()), Plan())
        await site.settled()

    # On a slow machine the answer to a later try may come too late as well.
    *before, last = site.counts
    assert set(before) == {("failed", "retried")}
    assert last == ("failed", "sent")
    assert "no answer within 0.5 s" in caplog.text


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
        settings = Settings(notification_url=f"http://127.0.0.1:{port}/s3cret-path", notification_timeout=60)
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
            notification_url=site.url.replace("http:", "https:"),
            notification_folder=str(tmp_path / "secret"),
            notification_timeout=60,
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
