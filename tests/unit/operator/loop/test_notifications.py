"""The queue of notifications: order, repetition, limits, and the stop; and what the loop makes of it."""

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web

from ppojob_api.v1alpha1.notification import NotificationsStatus
from ppojob_operator.api_server import ApiUnavailable
from ppojob_operator.notifications import Backoff, Notifier, Receiver
from ppojob_operator.notifications import notifier as notifier_module
from ppojob_operator.notifications.receiver import Outcome
from ppojob_operator.plan import JobKey, Plan
from ppojob_operator.settings import Settings
from tests.ports import server_port
from tests.unit.operator.loop.memory_cluster import GOOD, MemoryCluster, make_loop
from tests.unit.operator.loop.notified_site import (
    Site,
    eventually,
    job_with,
    pending,
    receiving,
)


def test_pauses_grow_to_a_limit_and_differ() -> None:
    backoff = Backoff(first=1, longest=300)

    pauses = {tries: [backoff.pause(tries, None) for _ in range(200)] for tries in (1, 2, 3, 9, 10, 5000)}

    for tries, limit in {1: 1, 2: 2, 3: 4, 9: 256, 10: 300, 5000: 300}.items():
        assert limit / 2 <= min(pauses[tries]) < max(pauses[tries]) <= limit
        assert len(set(pauses[tries])) > 100


async def test_a_dead_address_is_given_up_when_the_notification_is_too_old(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(server_port())

    async with site.notifier(notification_give_up_after=3600) as notifier:
        notifier.send(job_with(pending(age=60)), Plan())
        await eventually(lambda: bool(site.counts))
        # Only now, so that the first try is never too late.
        notifier._give_up_after = timedelta(seconds=60)
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


async def test_only_the_leader_sends() -> None:
    def follows() -> None:
        raise ApiUnavailable("this replica is not the leader")

    async with receiving(200) as site, site.notifier(guard=follows) as notifier:
        notifier.send(job_with(pending()), Plan())
        await asyncio.sleep(0.2)

    assert site.requests == []
    assert site.requeued == []


async def test_a_stop_lets_requests_end_and_does_not_wait_for_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than `notifier` waits for the end, so that a stop that waits for a retry fails there.
    monkeypatch.setattr(notifier_module, "_FLUSH_SECONDS", 400)
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
        assert site.counts == [("failed", "sent")]

        nobody = Site(server_port())
        async with nobody.notifier(Backoff(first=1000, longest=1000)) as notifier:
            notifier.send(job_with(pending(), key=dead), Plan())
            await eventually(lambda: bool(nobody.counts))
        assert nobody.requeued == [], "it stays in the status"


async def test_a_stop_ends_a_request_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "_FLUSH_SECONDS", 0.2)
    arrived = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with receiving(silent) as site:
        async with site.notifier(notification_timeout=60) as notifier:
            notifier.send(job_with(pending()), Plan())
            await arrived.wait()
            began = time.monotonic()
        assert time.monotonic() - began < 50, "the request would have ended by itself after 60 s"
        assert site.requeued == []


async def test_a_bug_of_one_request_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Receiver):
        async def post(self, body: bytes) -> Outcome:
            raise KeyError("s3cret")

    configured = Settings(notification_url="http://s3cret")
    stop, notifier = asyncio.Event(), Notifier(configured, Broken(configured))
    running = asyncio.create_task(notifier.run(stop))
    notifier.send(job_with(pending()), Plan())
    await eventually(lambda: "bug in the operator: KeyError" in caplog.text)
    assert not running.done()
    stop.set()
    await running

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
