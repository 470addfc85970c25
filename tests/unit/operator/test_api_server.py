"""The client of the API server, against a fake API server in this process that records the requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from ppojob_operator.api_server import JOBS, ApiError, ApiFailed, ApiRefused, ApiServer, ApiUnavailable
from ppojob_operator.cluster_progress import ProgressCluster
from tests.unit.operator.fake_api_server import connected

STATUS = {"phase": "Running"}
PATH = "/apis/ppojob.dev/v1alpha1/namespaces/ns/ppojobs/x"


class FakeAPIServer:
    """An API server with one PPOJob `ns/x`; `races`: how often the object changes between a read and a write."""

    def __init__(self) -> None:
        self.uid = "u"
        self.version = 7
        self.races = 0
        self.answer: tuple[int, str] | None = None
        self.delay = 0.0
        self.exists = False
        self.seen: list[str] = []
        self.written: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.raw_path}")
        await asyncio.sleep(self.delay)
        if self.answer is not None:
            return web.Response(status=self.answer[0], text=self.answer[1])
        metadata = {"namespace": "ns", "name": "x", "uid": self.uid, "resourceVersion": str(self.version)}
        if request.method == "GET":
            if self.races:
                self.races, self.version = self.races - 1, self.version + 1
            return web.json_response({"metadata": metadata})
        sent = json.loads(await request.text())
        if request.method == "POST":
            return web.json_response(sent, status=409 if self.exists else 201)
        if sent["metadata"]["resourceVersion"] != str(self.version):
            return web.json_response({"message": "the object has been modified"}, status=409)
        self.written.append({**sent, "manager": request.query.get("fieldManager")})
        return web.json_response({"metadata": metadata})


@pytest.fixture
def server() -> FakeAPIServer:
    return FakeAPIServer()


@pytest.fixture
async def api(server: FakeAPIServer) -> AsyncIterator[ApiServer]:
    async with connected(server.handle) as api:
        yield api


async def write(api: ApiServer) -> bool:
    return await api.apply_status("ns", "x", "u", status_of=lambda _: STATUS, manager="me")


async def test_a_status_is_written_to_the_object_as_it_was_just_read(api: ApiServer, server: FakeAPIServer) -> None:
    assert await write(api)

    assert server.seen == [f"GET {PATH}", f"PATCH {PATH}/status?fieldManager=me&force=true"]
    (written,) = server.written
    assert written["metadata"] == {"namespace": "ns", "name": "x", "resourceVersion": "7"}
    assert (written["status"], written["manager"]) == (STATUS, "me")


async def test_what_may_lag_is_read_from_the_api_servers_memory(api: ApiServer, server: FakeAPIServer) -> None:
    progress = ProgressCluster(api)

    assert await progress.read_job("ns", "x") is not None
    assert await progress.read_pod("ns", "p") is not None
    assert await api.read(JOBS, "ns", "x") is not None

    pod = "/api/v1/namespaces/ns/pods/p"
    assert server.seen == [f"GET {PATH}?resourceVersion=0", f"GET {pod}?resourceVersion=0", f"GET {PATH}"]


async def test_an_object_that_changed_in_between_is_read_again(api: ApiServer, server: FakeAPIServer) -> None:
    server.races = 2

    assert await write(api)

    assert [call.partition(" ")[0] for call in server.seen] == ["GET", "PATCH"] * 3
    assert len(server.written) == 1


async def test_an_object_that_changes_every_time_is_given_up_for_now(api: ApiServer, server: FakeAPIServer) -> None:
    server.races = 99

    with pytest.raises(ApiUnavailable, match=r"PPOJob ns/x changed 5 times while its status was being written"):
        await write(api)

    assert server.written == []


async def test_another_object_of_the_same_name_gets_nothing(api: ApiServer, server: FakeAPIServer) -> None:
    server.uid = "of a newer one"

    assert not await write(api)

    assert server.seen == [f"GET {PATH}"]


async def test_an_object_that_is_gone_gets_nothing(api: ApiServer, server: FakeAPIServer) -> None:
    server.answer = (404, "{}")

    assert not await write(api)
    assert await api.read(JOBS, "ns", "x") is None


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((503, '{"message": "etcd is away"}'), ApiUnavailable, r"GET .*/ppojobs/x: 503 etcd is away"),
        ((429, '{"message": "slowly"}'), ApiUnavailable, r"429 slowly"),
        ((403, '{"message": "x is forbidden"}'), ApiRefused, r"^403 x is forbidden"),
        ((500, '{"message": ".status.a: field not declared in schema"}'), ApiFailed, r"500 .*not declared in schema"),
        ((200, "a proxy's page"), ApiRefused, r"200 \"a proxy's page\"$"),
    ],
    ids=["away", "slowly", "forbidden", "unknown field", "no JSON"],
)
async def test_an_answer_is_reported_in_the_servers_words(
    api: ApiServer, server: FakeAPIServer, answer: tuple[int, str], error: type[ApiError], words: str
) -> None:
    server.answer = answer

    with pytest.raises(error, match=words):
        await api.read(JOBS, "ns", "x")


async def test_no_answer_in_time_names_the_call(server: FakeAPIServer, api: ApiServer) -> None:
    server.delay = 60.0
    api = ApiServer(api._client, timeout=0.05)

    with pytest.raises(ApiUnavailable, match=r"GET .*/namespaces/ns/ppojobs/x: no answer within 0.05 s"):
        await api.read(JOBS, "ns", "x")


async def test_nobody_there_is_no_answer() -> None:
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:1"
    async with ApiClient(configuration) as client:
        with pytest.raises(ApiUnavailable, match=r"GET .*: ClientConnectorError"):
            await ApiServer(client, timeout=20.0).read(JOBS, "ns", "x")


async def test_a_name_from_outside_leads_to_no_other_path(api: ApiServer, server: FakeAPIServer) -> None:
    await api.read(JOBS, "ns", "../../secrets/key")

    assert server.seen == ["GET /apis/ppojob.dev/v1alpha1/namespaces/ns/ppojobs/..%2F..%2Fsecrets%2Fkey"]


async def test_a_status_is_computed_from_the_object_at_each_try(api: ApiServer, server: FakeAPIServer) -> None:
    server.races = 2
    seen: list[str] = []

    def status_of(current: Any) -> dict[str, Any]:
        seen.append(current["metadata"]["resourceVersion"])
        return STATUS

    assert await api.apply_status("ns", "x", "u", status_of=status_of, manager="me")
    assert seen == ["7", "8", "9"]


async def test_where_there_is_nothing_to_write_nothing_is_sent(api: ApiServer, server: FakeAPIServer) -> None:
    assert await api.apply_status("ns", "x", "u", status_of=lambda _: None, manager="me")

    assert server.seen == [f"GET {PATH}"]


@pytest.mark.parametrize("exists", [False, True])
async def test_an_object_is_created_once(api: ApiServer, server: FakeAPIServer, exists: bool) -> None:
    server.exists = exists

    assert await api.create(JOBS, {"metadata": {"namespace": "ns", "name": "x"}}) is not exists


@pytest.mark.parametrize(("version", "is_replaced"), [("7", True), ("6", False)])
async def test_only_the_object_that_was_read_is_replaced(
    api: ApiServer, server: FakeAPIServer, version: str, is_replaced: bool
) -> None:
    manifest = {"metadata": {"namespace": "ns", "name": "x", "resourceVersion": version}}

    assert await api.replace(JOBS, manifest) is is_replaced
    assert len(server.written) == int(is_replaced)


async def test_a_guard_that_says_no_lets_nothing_be_written_but_everything_be_read(
    api: ApiServer, server: FakeAPIServer
) -> None:
    def guard() -> None:
        raise ApiUnavailable("does not lead")

    guarded = api.guarded(guard)

    assert await guarded.read(JOBS, "ns", "x")
    for method in ("PATCH", "POST", "PUT", "DELETE"):
        with pytest.raises(ApiUnavailable, match="does not lead"):
            await guarded.call(method, f"{JOBS}/{{name}}", "ns", "x", body={})
    assert server.seen == [f"GET {PATH}"]
