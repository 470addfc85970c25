"""Ray's dashboard over real HTTP: what is asked, what is understood, and that every call ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ppojob_operator.dashboard import Address, Dashboard, DashboardError
from ppojob_operator.plan import Ray, RayJob, RayState, Submission

SUBMISSION = Submission("ppojob-u-0", "python -m x", {"PPOJOB_ATTEMPT": "0"}, {"attempt": "0"}, "c")
LISTED = {
    "type": "SUBMISSION",
    "submission_id": "ppojob-u-0",
    "status": "FAILED",
    "message": "broken",
    "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR",
    "driver_exit_code": 1,
    "driver_node_id": "n1",
    "metadata": {"attempt": "0"},
}
DRIVER = {"type": "DRIVER", "submission_id": None, "job_id": "01000000", "status": "RUNNING"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def dashboard(handler: Handler, timeout: float = 60.0) -> AsyncIterator[tuple[Dashboard, Address]]:
    """Serve a dashboard and yield a client with its address."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield Dashboard(session, timeout=timeout), Address(f"http://127.0.0.1:{port}", "secret-token")
    finally:
        await runner.cleanup()


def answering(status: int, body: Any) -> Handler:
    """Return a handler that always says the same."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(body, status=status) if status < 400 else web.Response(text=body, status=status)

    return handler


async def test_rays_list_is_understood_and_jobs_that_nobody_submitted_are_left_out() -> None:
    async with dashboard(answering(200, [LISTED, DRIVER])) as (client, address):
        found = await client.list_jobs(address)

    expected = RayJob(
        "ppojob-u-0", RayState.FAILED, "broken", "JOB_ENTRYPOINT_COMMAND_ERROR", 1, {"attempt": "0"}, "n1"
    )
    assert found == Ray(jobs=(expected,))


async def test_the_token_goes_along() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response([])

    async with dashboard(handler) as (client, address):
        await client.list_jobs(address)

    assert seen == ["Bearer secret-token"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, "Unauthorized", "401 Unauthorized"),
        (500, "Traceback\n  File\nRuntimeError: boom", "500 RuntimeError: boom"),
        (200, {"a": 1}, "the answer is not a list of jobs (all of it: Input should be a valid array)"),
        (200, [5], "is not a list of jobs ([0]: "),
        (200, [{**LISTED, "status": "EVICTED"}], "is not a list of jobs ([0]['status']: Input should be 'PENDING'"),
        (200, [LISTED, {**LISTED, "metadata": "x"}], "is not a list of jobs ([1]['metadata']: "),
        (200, [{**LISTED, "metadata": {"a": []}}], "is not a list of jobs ([0]['metadata']['a']: "),
        (200, [{**LISTED, "driver_exit_code": "x"}], "is not a list of jobs ([0]['driver_exit_code']: "),
        (200, [{**LISTED, "driver_exit_code": 10**30}], "is not a list of jobs ([0]['driver_exit_code']: "),
        (200, [LISTED] * 1001, "List should have at most 1000 items"),
    ],
)
async def test_what_is_wrong_is_said_and_never_the_token(status: int, body: Any, words: str) -> None:
    async with dashboard(answering(status, body)) as (client, address):
        found = await client.list_jobs(address)

    assert found.jobs == ()
    assert words in found.problem
    assert "secret-token" not in found.problem + repr(address)


@pytest.mark.parametrize("data", ["[" * 100_000, "[" + "{}," * 500_000 + "{}]", "<html>", ""])
async def test_what_is_no_list_is_refused_before_it_is_built(data: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=data)

    async with dashboard(handler) as (client, address):
        found = await client.list_jobs(address)

    assert "the answer is not a list of jobs" in found.problem
    assert len(found.problem) < 1000


async def test_a_dashboard_that_hangs_has_a_limit() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with dashboard(handler, timeout=0.1) as (client, address):
        found = await client.list_jobs(address)

    assert found.problem.endswith("/api/jobs/: no answer within 0.1 s")


async def test_a_dashboard_that_is_not_there_is_named() -> None:
    async with aiohttp.ClientSession() as session:
        found = await Dashboard(session, timeout=1).list_jobs(Address("http://127.0.0.1:9", "t"))

    assert "127.0.0.1:9" in found.problem


async def test_the_submission_asks_for_no_resources_so_that_it_runs_on_the_head() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append((request.method, request.path, await request.json()))
        return web.json_response({"submission_id": "ppojob-u-0"})

    async with dashboard(handler) as (client, address):
        await client.submit(address, SUBMISSION)

    body = {
        "submission_id": "ppojob-u-0",
        "entrypoint": "python -m x",
        "entrypoint_num_cpus": 0,
        "runtime_env": {"env_vars": {"PPOJOB_ATTEMPT": "0"}},
        "metadata": {"attempt": "0"},
    }
    assert bodies == [("POST", "/api/jobs/", body)]


@pytest.mark.parametrize(("jobs", "is_error"), [([LISTED], False), ([], True)])
async def test_a_refused_submission_is_no_error_if_ray_has_it_already(jobs: list[Any], is_error: bool) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            return web.Response(text="ValueError: Job with submission_id ppojob-u-0 already exists.", status=400)
        return web.json_response(jobs)

    async with dashboard(handler) as (client, address):
        if is_error:
            with pytest.raises(DashboardError, match="400 ValueError: Job with submission_id"):
                await client.submit(address, SUBMISSION)
        else:
            await client.submit(address, SUBMISSION)


async def test_a_job_is_ended_by_its_submission() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, request.headers.get("Authorization")))
        return web.json_response({"stopped": True})

    async with dashboard(handler) as (client, address):
        await client.stop(address, "ppojob-u-0")

    assert seen == [("POST", "/api/jobs/ppojob-u-0/stop", "Bearer secret-token")]


@pytest.mark.parametrize(
    ("status", "body", "is_error"),
    [
        (200, {"stopped": False}, False),
        (404, "Job ppojob-u-0 does not exist", False),
        (500, "Traceback\nRuntimeError: no agent", True),
    ],
)
async def test_a_job_that_has_ended_or_is_gone_needs_no_end(status: int, body: Any, is_error: bool) -> None:
    async with dashboard(answering(status, body)) as (client, address):
        if is_error:
            with pytest.raises(DashboardError, match="500 RuntimeError: no agent"):
                await client.stop(address, "ppojob-u-0")
        else:
            await client.stop(address, "ppojob-u-0")


async def test_who_leads_no_longer_ends_nothing() -> None:
    def guard() -> None:
        raise RuntimeError("another replica leads")

    async with aiohttp.ClientSession() as session:
        client = Dashboard(session, timeout=1, guard=guard)
        with pytest.raises(RuntimeError, match="another replica leads"):
            await client.stop(Address("http://127.0.0.1:9", "t"), "ppojob-u-0")


async def test_the_end_of_the_log_is_read_from_the_drivers_node() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, dict(request.query)))
        return web.Response(text="one\ntwo\n")

    async with dashboard(handler) as (client, address):
        text = await client.log_tail(address, RayJob("ppojob-u-0", RayState.FAILED, node_id="n1"))

    assert text == "one\ntwo\n"
    query = {"submission_id": "ppojob-u-0", "node_id": "n1", "lines": "1000", "filter_ansi_code": "true"}
    assert seen == [("/api/v0/logs/file", query)]


async def test_of_long_lines_of_a_log_only_the_end_is_kept() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="x" * 3_000_000 + "\nthe last line\n")

    async with dashboard(handler) as (client, address):
        text = await client.log_tail(address, RayJob("s", RayState.FAILED))

    assert len(text) == 1024 * 1024
    assert text.endswith("x\nthe last line\n")


async def test_where_the_log_cannot_be_read_rays_message_must_do() -> None:
    async with dashboard(answering(500, "no such node")) as (client, address):
        text = await client.log_tail(address, RayJob("s", RayState.FAILED, message="last lines"))

    assert "500 no such node" in text
    assert text.endswith("last lines")


async def test_a_redirect_is_not_followed_and_its_target_not_shown() -> None:
    asked: list[str] = []

    async def redirecting(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/secret":
            return web.json_response([{**LISTED, "message": "what only the operator may read"}])
        raise web.HTTPFound("/secret")

    async with dashboard(redirecting) as (client, address):
        found = await client.list_jobs(address)

    assert asked == ["/api/jobs/"]
    assert found.jobs == ()
    assert ": 302 " in found.problem


@pytest.mark.parametrize(("status", "text"), [(200, "secret " * 10_000), (403, "secret " * 10_000)])
async def test_a_service_that_leads_elsewhere_gives_one_token_away_and_little_of_the_answer_is_shown(
    status: int, text: str
) -> None:
    sent: list[dict[str, str]] = []

    async def elsewhere(request: web.Request) -> web.Response:
        sent.append({name: value for name, value in request.headers.items() if name not in ("Host", "User-Agent")})
        return web.Response(text=text, status=status, headers={"Set-Cookie": "a=b"})

    async with dashboard(elsewhere) as (client, address):
        problems = [(await client.list_jobs(address)).problem for _ in range(2)]

    # Each RayCluster has another token: test_dashboard_secret.
    expected = {"Authorization": "Bearer secret-token", "Accept": "*/*", "Accept-Encoding": "gzip, deflate"}
    assert [{name: headers[name] for name in expected} for headers in sent] == [expected, expected]
    assert all(set(headers) == set(expected) for headers in sent), "no cookie, and no token of the operator"
    for problem in problems:
        assert problem.count("secret ") <= 500 / len("secret ") + 1


async def test_an_answer_without_end_is_cut_off() -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while sent < 1_000_000_000:
            await answer.write(b"x" * 10_000)
            sent += 10_000
        return answer

    async with dashboard(endless) as (client, address):
        found = await client.list_jobs(address)

    assert "the answer has more than 4194304 bytes" in found.problem
    assert sent < 100_000_000
