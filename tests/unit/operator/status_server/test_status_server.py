"""The whole server over TLS in this process: reports, probes, metrics, limits, and a stop that loses nothing."""

import asyncio
import itertools
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import aiohttp
import pytest
from aiohttp import web

from ppojob_api.v1alpha1.progress import MAX_REPORT_BYTES, REPORT_PATH
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.plan import JobKey
from ppojob_operator.reconcile import JobState
from ppojob_operator.status_server import (
    CertificateError,
    Health,
    OperatorMetrics,
    StatusServer,
    StatusServerSettings,
)
from ppojob_operator.status_server.limits import RequestLimits
from tests.ports import server_port
from tests.unit.operator.status_server.conftest import TOKEN, FakeCluster, make_token

PATH = REPORT_PATH.format(namespace="rl-team", name="arithmetic")
LIMIT = 120.0
NAMES: Any = {"service_account_name": "{}-trainer".format, "fetch_job_name": "{}-fetch".format}


def _metrics() -> OperatorMetrics:
    """Return metrics of two running jobs and a failed one."""
    metrics = OperatorMetrics()
    phases = {"a": "Running", "b": "Running", "c": "Failed"}
    states = {JobKey("ns", name): JobState(phase) for name, phase in phases.items()}
    metrics.ask(job_states=lambda: states, queue_depth=lambda: 0, left_alone=lambda: 0, leads=lambda: True)
    return metrics


class Gate(asyncio.Event):
    """An event that knows how many wait for it."""

    num_waiting = 0

    async def wait(self) -> Literal[True]:
        self.num_waiting += 1
        return await super().wait()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.01)


class Running:
    """A server that runs, and a client that trusts it."""

    def __init__(self, server: StatusServer, settings: StatusServerSettings, health: Health) -> None:
        self.server = server
        self.health = health
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(server.run(self.stop))
        self.reports = f"https://localhost:{settings.port}"
        self.probes = f"http://localhost:{settings.probe_port}"
        self.port = settings.port
        self.tls = ssl.create_default_context(cadata=server.ca_bundle())

    async def post(self, body: Any, authorization: str, path: str = PATH) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Authorization": authorization}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.reports + path, data=data, ssl=self.tls, headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self.probes + path) as answer:
            return answer.status, await answer.text()

    async def until_ready(self) -> None:
        async with asyncio.timeout(LIMIT):
            while not await self.is_ready():
                await asyncio.sleep(0.01)

    async def is_ready(self) -> bool:
        if self.task.done():
            self.task.result()
        try:
            return (await self.get("/readyz"))[0] == 200
        except aiohttp.ClientConnectionError:
            return False


@asynccontextmanager
async def serving(
    cluster: FakeCluster, settings: StatusServerSettings, *beside: tuple[int, web.Application]
) -> AsyncIterator[Running]:
    health = Health()
    server = StatusServer(
        settings,
        port=cluster,
        secrets=cluster,
        **NAMES,
        health=health,
        metrics=_metrics(),
    )
    for port, application in beside:
        server.serve_beside(port, application)
    await server.prepare()
    running = Running(server, settings, health)
    try:
        await running.until_ready()
        yield running
    finally:
        running.stop.set()
        await running.task


async def test_a_trainer_reports_and_gets_the_live_part_of_the_spec(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], authorization: str
) -> None:
    async with serving(cluster, settings) as running:
        status, reply = await running.post(report, authorization)

    assert status == 200
    assert reply["command"] == "None"
    assert reply["settings"]["checkpointEverySteps"] == 50
    [(_, written)] = cluster.writes
    assert written["progress"]["step"] == 12


async def test_the_last_report_is_in_the_status_when_the_answer_comes(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], authorization: str
) -> None:
    async with serving(cluster, settings) as running:
        await running.post(report, authorization)
        await until(lambda: len(cluster.writes) == 1)
        status, _ = await running.post({**report, "activity": "Finished", "step": 120}, authorization)

        assert status == 200
        assert [written["progress"]["step"] for _, written in cluster.writes] == [12, 120]


async def test_a_stop_writes_the_reports_that_are_kept(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], authorization: str
) -> None:
    # However long the requests take, the second and the third report come within the interval.
    async with serving(cluster, replace(settings, write_interval_seconds=3600.0)) as running:
        for step in (1, 2, 3):
            await running.post({**report, "step": step}, authorization)
            await until(lambda: cluster.writes)
        before = [written["progress"]["step"] for _, written in cluster.writes]

    after = [written["progress"]["step"] for _, written in cluster.writes]
    assert before == [1]
    assert after == [1, 3]


async def test_a_request_in_work_is_finished_at_a_stop(
    cluster: Any,
    settings: StatusServerSettings,
    report: dict[str, Any],
    authorization: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ppojob_operator.status_server.server._SHUTDOWN_SECONDS", LIMIT)
    gate = Gate()
    cluster.before_write = gate.wait
    async with serving(cluster, settings) as running:
        answer = asyncio.create_task(running.post({**report, "activity": "Finished"}, authorization))
        await until(lambda: gate.num_waiting)
        running.stop.set()
        await asyncio.sleep(0.1)
        gate.set()

        assert (await answer)[0] == 200


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_huge_body_is_refused_before_it_is_read(
    cluster: Any, settings: StatusServerSettings, authorization: str, is_chunked: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b"x" * 1024

    async with serving(cluster, settings) as running, aiohttp.ClientSession() as session:
        body = chunks() if is_chunked else b"x" * (MAX_REPORT_BYTES + 1)
        headers = {"Authorization": authorization}
        async with session.post(running.reports + PATH, data=body, ssl=running.tls, headers=headers) as answer:
            assert answer.status == 413
            assert (await answer.json())["reason"] == "TooLarge"


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever(
    cluster: Any, settings: StatusServerSettings, authorization: str
) -> None:
    async with serving(cluster, replace(settings, request_timeout_seconds=0.5)) as running:
        reader, writer = await asyncio.open_connection(
            "localhost", running.port, ssl=running.tls, server_hostname="localhost"
        )
        headers = f"Host: x\r\nAuthorization: {authorization}\r\nContent-Length: 100"
        writer.write(f"POST {PATH} HTTP/1.1\r\n{headers}\r\n\r\n{{".encode())
        async with asyncio.timeout(LIMIT):
            answer = await reader.readuntil(b"}")
        writer.close()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"TooSlow" in answer


async def test_more_reports_than_the_operator_can_process_are_rejected(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], authorization: str
) -> None:
    gate = asyncio.Event()
    cluster.before_write = gate.wait
    last = {**report, "activity": "Finished"}
    async with serving(cluster, replace(settings, requests=RequestLimits(total=2))) as running:
        posts = [asyncio.create_task(running.post(last, authorization)) for _ in range(3)]
        async with asyncio.timeout(LIMIT):
            [refused], busy = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        status, answer = refused.result()
        gate.set()
        assert [status for status, _ in await asyncio.gather(*busy)] == [200, 200]

    assert (status, answer["reason"]) == (503, "Unavailable")
    assert "busy" in answer["message"]


async def test_tokens_are_never_logged(
    cluster: Any,
    settings: StatusServerSettings,
    report: dict[str, Any],
    authorization: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    cluster.errors["apply_progress"] = iter([ApiUnavailable("no answer")])
    async with serving(cluster, settings) as running:
        await running.post(report, authorization)
        await running.post(report, f"Bearer {make_token('bad')}")
        await running.post(b"bad-secret", "Bearer bad-secret", path=PATH.replace("arith", "%0afaked"))

    assert "Unauthenticated" in caplog.text
    assert "secret" not in caplog.text
    assert TOKEN not in caplog.text
    assert make_token("bad") not in caplog.text
    assert "\nfaked" not in caplog.text


async def test_only_post_to_the_one_path_is_answered(cluster: Any, settings: StatusServerSettings) -> None:
    async with serving(cluster, settings) as running, aiohttp.ClientSession() as session:
        for path, status in ((PATH, 405), ("/", 404), ("/metrics", 404), ("/healthz", 404)):
            async with session.get(running.reports + path, ssl=running.tls) as answer:
                assert answer.status == status


async def test_another_application_is_served_beside_with_the_same_certificates_until_the_end(
    cluster: Any, settings: StatusServerSettings
) -> None:
    async def greet(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    beside, port = web.Application(), server_port()
    beside.router.add_get("/", greet)
    async with serving(cluster, settings, (port, beside)) as running, aiohttp.ClientSession() as session:
        async with session.get(f"https://localhost:{port}/", ssl=running.tls) as answer:
            assert await answer.text() == "hello"
        async with session.post(f"https://localhost:{port}{PATH}", ssl=running.tls) as answer:
            assert answer.status == 404

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("localhost", port)


async def test_probes_show_problems_by_name_and_log_each_once(
    cluster: Any, settings: StatusServerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    ages = itertools.count(400)
    problems = [lambda: f"no event for {next(ages)} s"]
    caplog.set_level(logging.INFO)
    async with serving(cluster, settings) as running:
        assert await running.get("/healthz") == (200, "ok\n")

        running.health.check("watch of ppojobs", lambda: problems[0]() if problems else "")
        running.health.ready_when("indexes", lambda: "not full yet")

        assert await running.get("/healthz") == (503, "watch of ppojobs: no event for 400 s\n")
        assert await running.get("/healthz") == (503, "watch of ppojobs: no event for 401 s\n")
        assert await running.get("/readyz") == (503, "indexes: not full yet\n")
        problems.clear()
        assert await running.get("/healthz") == (200, "ok\n")

    logged = [each.getMessage() for each in caplog.records if each.name.endswith(".probes")]
    assert logged == [
        "/healthz: watch of ppojobs: no event for 400 s",
        "/readyz: indexes: not full yet",
        "/healthz: ok",
    ]


async def test_metrics_count_jobs_reports_and_passes(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], authorization: str
) -> None:
    async with serving(cluster, settings) as running:
        await running.post(report, authorization)
        await running.post({**report, "attempt": 0}, authorization)
        await running.post({**report, "attempt": 10**9}, authorization)
        await running.post(b"{", authorization)
        status, text = await running.get("/metrics")

    assert status == 200
    for line in (
        'ppojob_jobs{phase="Failed"} 1.0',
        'ppojob_jobs{phase="Running"} 2.0',
        'ppojob_progress_reports_total{outcome="Accepted"} 1.0',
        'ppojob_progress_reports_total{outcome="StaleAttempt"} 1.0',
        'ppojob_progress_reports_total{outcome="UnknownAttempt"} 1.0',
        'ppojob_progress_reports_total{outcome="Malformed"} 1.0',
    ):
        assert line in text.splitlines()


async def test_a_port_that_is_taken_ends_the_server(cluster: Any, settings: StatusServerSettings) -> None:
    async with serving(cluster, settings):
        second = StatusServer(
            settings,
            port=cluster,
            secrets=cluster,
            **NAMES,
            health=Health(),
            metrics=OperatorMetrics(),
        )
        await second.prepare()
        with pytest.raises(OSError, match="address already in use"):
            await second.run(asyncio.Event())


async def test_a_loop_that_ends_by_itself_ends_the_server(cluster: Any, settings: StatusServerSettings) -> None:
    async with serving(cluster, settings) as running:
        cluster.errors["read_secret"] = iter([ValueError("a bug")])
        broken = StatusServer(
            replace(settings, port=server_port(), probe_port=server_port(), certificate_check_seconds=0.01),
            port=cluster,
            secrets=cluster,
            **NAMES,
            health=running.health,
            metrics=OperatorMetrics(),
        )
        with pytest.raises(RuntimeError, match="'certificates' of the status server ended by itself"):
            await broken.run(asyncio.Event())


async def test_a_right_that_is_missing_is_named_at_the_start(cluster: Any, settings: StatusServerSettings) -> None:
    cluster.errors["read_secret"] = iter([ApiUnavailable("starting"), ApiRefused("403 secrets is forbidden")])
    server = StatusServer(settings, port=cluster, secrets=cluster, **NAMES, health=Health(), metrics=OperatorMetrics())

    with pytest.raises(CertificateError, match=r"system/ppojob-operator-certificates: give .* get and update"):
        await server.prepare()


@pytest.mark.parametrize(
    ("public_url", "base"),
    [("", "https://ppojob-operator.system.svc:443"), ("https://10.0.0.1:8443/", "https://10.0.0.1:8443")],
)
def test_the_address_for_trainers_is_the_services_or_the_one_that_is_given(
    cluster: Any, settings: StatusServerSettings, public_url: str, base: str
) -> None:
    server = StatusServer(
        replace(settings, public_url=public_url),
        port=cluster,
        secrets=cluster,
        **NAMES,
        health=Health(),
        metrics=OperatorMetrics(),
    )

    assert server.report_url("rl-team", "arithmetic") == f"{base}{PATH}"


def test_a_heartbeat_that_stops_is_a_problem() -> None:
    now = 0.0
    health = Health(clock=lambda: now)
    heartbeat = health.heartbeat("reconcile loop", 120)

    now = 120.0
    assert health.live_problems() == []
    now = 121.0
    assert health.live_problems() == ["reconcile loop: has not run for 121 s; the limit is 120 s"]
    heartbeat.beat()
    assert health.live_problems() == []
    assert health.ready_problems() == []
