"""What a hostile pod can send to the whole server over TLS, and that a good report is answered meanwhile."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from ppojob_api.v1alpha1.progress import progress_audience
from ppojob_operator.status_server import StatusServerSettings, TokenIdentity, authentication
from ppojob_operator.status_server.limits import ConnectionLimits, RequestLimits
from tests.unit.operator.status_server.conftest import make_token
from tests.unit.operator.status_server.test_status_server import LIMIT, PATH, Running, serving, until

HOSTILE, GOOD = "127.0.0.2", "127.0.0.1"
NUM_SLOW, BATCH = 300, 50


SLOW_HEADERS = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nX-Slow: "
SLOW_BODY = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{"


async def connect_both(
    running: Running, text: str | None, *, source: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send part of a request; without a text, not even the TLS handshake begins."""
    tls: dict[str, Any] = {} if text is None else {"ssl": running.tls, "server_hostname": "localhost"}
    reader, writer = await asyncio.open_connection(GOOD, running.port, local_addr=(source, 0), **tls)
    writer.write((text or "").encode())
    return reader, writer


async def connected_at_last(
    running: Running, text: str | None, *, source: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Do the same as often as needed: on a slow machine, the handshake alone may take longer than the server waits."""
    while True:
        with contextlib.suppress(ConnectionError):
            return await connect_both(running, text, source=source)


async def connect(running: Running, text: str | None, *, source: str) -> asyncio.StreamWriter:
    """Do the same, for a connection that is never read."""
    return (await connect_both(running, text, source=source))[1]


@asynccontextmanager
async def slow_connections(running: Running, text: str | None, *, source: str) -> AsyncIterator[None]:
    """Hold as many slow connections as one source gets; those that the server closes are let go."""
    opened: list[asyncio.StreamWriter | BaseException] = []
    for _ in range(0, NUM_SLOW, BATCH):
        batch = (connect(running, text, source=source) for _ in range(BATCH))
        opened += await asyncio.gather(*batch, return_exceptions=True)
    try:
        yield
    finally:
        for writer in opened:
            if isinstance(writer, asyncio.StreamWriter):
                writer.transport.abort()


async def post(running: Running, report: Any, token: str, *, source: str = GOOD, path: str = PATH) -> tuple[int, Any]:
    connector = aiohttp.TCPConnector(local_addr=(source, 0), ssl=running.tls)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        session.post(running.reports + path, data=json.dumps(report)) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("source", [HOSTILE, GOOD], ids=["another source", "the same source"])
@pytest.mark.parametrize("text", [None, SLOW_HEADERS, SLOW_BODY], ids=["handshake", "headers", "body"])
async def test_a_good_report_is_answered_while_slow_connections_without_a_token_are_open(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], text: str | None, source: str
) -> None:
    async with serving(cluster, settings) as running, slow_connections(running, text, source=source):
        status, reply = await post(running, report, make_token())

    assert status == 200, reply


def begun(token: str) -> str:
    """Return a request with a token, whose body does not arrive."""
    return f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 1000\r\n\r\n{{"


async def test_slow_bodies_with_the_token_of_one_job_take_no_request_from_another(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], job: dict[str, Any], pod: dict[str, Any]
) -> None:
    audience = progress_audience("rl-team", "other", "uid-2")
    slow = make_token(aud=[audience])
    cluster.tokens[slow, audience] = TokenIdentity(
        "system:serviceaccount:rl-team:other-trainer", (audience,), "other-head", "pod-2"
    )
    text = begun(slow).replace("ppojobs/arithmetic/", "ppojobs/other/")
    few = replace(settings, requests=RequestLimits(total=8, per_job=4))
    async with serving(cluster, few) as running, slow_connections(running, text, source=HOSTILE):
        status, reply = await post(running, report, make_token())
        refused, answer = await post(running, report, slow, path=PATH.replace("arithmetic", "other"))

    assert status == 200, reply
    assert (refused, answer["reason"]) == (429, "TooManyRequests")


@pytest.mark.parametrize(
    "text", [None, SLOW_HEADERS, begun(make_token("forged"))], ids=["handshake", "headers", "body"]
)
async def test_a_connection_whose_sender_stays_unknown_is_closed(
    cluster: Any, settings: StatusServerSettings, text: str | None
) -> None:
    is_answered = text is not None and "forged" in text
    # An answer comes at once, but on a slow machine not within half a second.
    limited = replace(settings, connections=ConnectionLimits(seconds=LIMIT if is_answered else 0.5))
    async with serving(cluster, limited) as running, asyncio.timeout(LIMIT):
        reader, writer = await connected_at_last(running, text, source=HOSTILE)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()
        _, metrics = await running.get("/metrics")

    assert ('ppojob_closed_connections_total{reason="TooSlow"}' in metrics) is not is_answered


async def test_a_known_sender_is_not_cut_off_by_the_time_for_strangers(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any]
) -> None:
    body = json.dumps(report).encode()
    head = begun(make_token()).replace("1000", str(len(body))).removesuffix("{")
    async with serving(cluster, settings) as running, asyncio.timeout(LIMIT):
        reader, writer = await connect_both(running, head, source=GOOD)
        *_, connections = running.server._reports
        await until(lambda: connections._protected)
        [address] = connections._protected
        # What the connection's timer calls at the end of that time, which on a slow machine passes earlier.
        connections.expire(address)
        writer.write(body)
        answer = await reader.read()
        writer.transport.abort()

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Connection: close" in answer


async def test_random_tokens_cost_no_token_review(cluster: Any, settings: StatusServerSettings, report: Any) -> None:
    async with serving(cluster, settings) as running:
        for number in range(40):
            status, _ = await post(running, report, f"random-{number}", source=HOSTILE)
            assert status == 401

    assert cluster.reviews == 0


async def test_forged_tokens_cost_few_token_reviews_and_other_sources_are_reviewed(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the requests take, no more reviews than the first ones are allowed.
    monkeypatch.setattr(authentication, "_REFUSED_PER_SECOND", 1e-6)
    statuses = set()
    async with serving(cluster, settings) as running:
        for number in range(100):
            statuses.add((await post(running, report, make_token(f"forged-{number}"), source=HOSTILE))[0])
        assert cluster.reviews == authentication._REFUSED_BURST
        assert (await post(running, report, make_token()))[0] == 200

    assert statuses == {401, 429}


async def test_a_compressed_body_is_not_unpacked(
    cluster: Any, settings: StatusServerSettings, authorization: str
) -> None:
    async with serving(cluster, settings) as running:
        packed = gzip.compress(b" " * 10_000_000)
        headers = {"Authorization": authorization, "Content-Encoding": "gzip"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=running.tls), headers=headers) as session,
            session.post(running.reports + PATH, data=packed) as answer,
        ):
            assert answer.status == 400
            assert (await answer.json())["reason"] == "Malformed"


async def test_reports_of_one_job_beyond_its_rate_are_refused_and_those_of_another_are_not(
    cluster: Any, settings: StatusServerSettings, report: dict[str, Any], authorization: str
) -> None:
    slow = replace(settings, requests=RequestLimits(per_second=0.001, burst=3))
    async with serving(cluster, slow) as running:
        answers = [await running.post({**report, "number": number}, authorization) for number in range(17, 22)]

    assert [status for status, _ in answers] == [200, 200, 200, 429, 429]
    assert "rl-team/arithmetic sent more than 0.001 reports per second" in answers[-1][1]["message"]
