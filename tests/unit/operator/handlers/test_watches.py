"""A real Kopf against a fake API server that breaks the watches."""

import asyncio
import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web

from ppojob_operator.cluster import Cluster
from ppojob_operator.handlers import Watches
from ppojob_operator.handlers.registry import kopf_settings
from ppojob_operator.handlers.watches import _ended
from ppojob_operator.plan import JobKey
from ppojob_operator.settings import Settings
from tests.unit.operator.fake_api_server import connected

LIMIT = 240.0
KINDS = {
    "": ("v1", {"pods": "Pod", "namespaces": "Namespace"}),
    "ppojob.dev": ("v1alpha1", {"ppojobs": "PPOJob"}),
    "ray.io": ("v1", {"rayclusters": "RayCluster"}),
    "apiextensions.k8s.io": ("v1", {"customresourcedefinitions": "CustomResourceDefinition"}),
}
Answer = Callable[[web.Request], Any]


def error(code: int) -> dict[str, Any]:
    """Return an error as the API server sends it within a watch."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": f"server {code}"}
    return {"type": "ERROR", "object": status}


class FakeAPIServer:
    """The API server: discovery, one PPOJob in each namespace, and watches that stay open.

    `breaks` are used up one by one. Requests in `forbidden` namespaces are refused, and watches there end.
    """

    def __init__(self) -> None:
        self.breaks: list[Answer] = []
        self.forbidden: set[str] = set()
        self.has_kuberay = True
        self.requests: Counter[str] = Counter()
        """Lists and watches of PPOJobs, watches of RayClusters, requests about namespaces as a whole, and refused
        requests: the operator's, and Kopf's."""
        self.labels: asyncio.Queue[str] = asyncio.Queue()
        """Types of events about a namespace."""
        self.selectors: list[str] = []
        """Of the watches of namespaces."""
        self.watched: Counter[str] = Counter()
        """Watches of PPOJobs by namespace."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        found = re.search("/namespaces/([^/]+)/", path)
        namespace = found[1] if found else ""
        if namespace in self.forbidden:
            self.requests["refused probe" if request.query.get("limit") == "1" else "refused"] += 1
            return await refuses(403)(request)
        if path.startswith("/apis/ray.io") and not self.has_kuberay:
            self.requests["no KubeRay"] += 1
            return await refuses(404)(request)
        is_watch = request.query.get("watch") == "true"
        self.requests["namespaces"] += path == "/api/v1/namespaces"
        self.requests["watch of RayClusters"] += is_watch and path.endswith("/rayclusters")
        if path.endswith("/ppojobs"):
            self.requests["watch" if is_watch else "list"] += "limit" not in request.query or is_watch
            self.watched[namespace] += is_watch
            if is_watch and self.breaks:
                return await self.breaks.pop(0)(request)
            return await self.hold(request, namespace) if is_watch else web.json_response(collection([job(namespace)]))
        if path.endswith(("/pods", "/rayclusters", "/api/v1/namespaces", "/customresourcedefinitions")):
            return await self.watch(request, namespace) if is_watch else web.json_response(collection([]))
        return web.json_response(discovery(path))

    async def watch(self, request: web.Request, namespace: str) -> web.StreamResponse:
        """Answer a watch of namespaces with each of `labels`, as it is put there, and any other one with nothing."""
        if not request.path.endswith("/namespaces"):
            return await self.hold(request, namespace)
        response = web.StreamResponse()
        await response.prepare(request)
        self.selectors.append(request.query.get("labelSelector", ""))
        while True:
            kind = await self.labels.get()
            event = {"type": kind, "object": namespace_called("a")}
            await response.write(json.dumps(event).encode() + b"\n")

    async def hold(self, request: web.Request, namespace: str) -> web.StreamResponse:
        """Answer a watch with nothing until the client leaves or the namespace is forbidden."""
        response = web.StreamResponse()
        await response.prepare(request)
        while namespace not in self.forbidden:
            await asyncio.sleep(0.05)
        return response


def job(namespace: str) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": "first", "uid": f"uid-{namespace}", "resourceVersion": "5"}
    return {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": metadata}


def namespace_called(name: str) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "6"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def collection(items: list[Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "5"}, "items": items}


def discovery(path: str) -> dict[str, Any]:
    """Return what the API server says of its groups and kinds."""
    for group, (version, kinds) in KINDS.items():
        if path == (f"/apis/{group}/{version}" if group else f"/api/{version}"):
            resources = [
                {
                    "name": plural,
                    "singularName": "",
                    "kind": kind,
                    "namespaced": True,
                    "verbs": ["get", "list", "watch"],
                }
                for plural, kind in kinds.items()
            ]
            return {"groupVersion": f"{group}/{version}".lstrip("/"), "resources": resources}
    groups = []
    for group, (version, _) in KINDS.items():
        served = {"groupVersion": f"{group}/{version}", "version": version}
        groups += [{"name": group, "versions": [served], "preferredVersion": served}] if group else []
    roots: dict[str, dict[str, Any]] = {"/api": {"versions": ["v1"]}, "/apis": {"groups": groups}}
    return roots.get(path, {})


async def hold(request: web.Request, *events: Any) -> web.StreamResponse:
    """Answer a watch with events, and then with nothing until the client leaves."""
    response = web.StreamResponse()
    await response.prepare(request)
    for event in events:
        await response.write(json.dumps(event).encode() + b"\n")
    await asyncio.sleep(LIMIT)
    return response


def says(code: int) -> Answer:
    """Answer a watch with an error in its stream."""
    return lambda request: hold(request, error(code))


def refuses(status: int) -> Answer:
    """Answer a watch with an HTTP status."""

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "code": status, "message": "fake"}, status=status)

    return refuse


async def resets(request: web.Request) -> web.StreamResponse:
    """Cut the connection of a watch."""
    response = web.StreamResponse()
    await response.prepare(request)
    assert request.transport is not None
    request.transport.abort()
    return response


@asynccontextmanager
async def watching(
    server: FakeAPIServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *namespaces: str,
    selector: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[asyncio.Task[None], list[JobKey]]]:
    async with connected(server.answer) as api:
        configuration = folder / "kubeconfig"
        configuration.write_text(
            yaml.safe_dump(
                {
                    "clusters": [{"name": "fake", "cluster": {"server": api._client.configuration.host}}],
                    "users": [{"name": "nobody", "user": {"token": "fake"}}],
                    "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
                    "current-context": "fake",
                }
            )
        )
        monkeypatch.setenv("KUBECONFIG", str(configuration))
        noted: list[JobKey] = []
        stop = asyncio.Event()
        cluster = Cluster(api, reporter="test")
        settings = Settings(watch_namespaces=namespaces, namespace_selector=selector or {})  # type: ignore[arg-type]
        watches = Watches(
            settings,
            cluster,
            noted.append,
            lambda: server.requests.update(["changed namespace"]),
            count_failure=lambda: server.requests.update(["failure"]),
        )
        task = asyncio.create_task(watches.run(stop))
        try:
            yield task, noted
        finally:
            stop.set()
            await asyncio.wait([task], timeout=LIMIT)


@pytest.mark.parametrize(
    ("broken", "num_failures"),
    [
        pytest.param(says(500), 1, id="stream 500"),
        pytest.param(says(403), 1, id="stream 403"),
        pytest.param(refuses(410), 1, id="HTTP 410"),
        pytest.param(says(410), 0, id="stream 410"),
        pytest.param(resets, 0, id="reset"),
        pytest.param(refuses(403), 0, id="HTTP 403"),
        pytest.param(refuses(500), 0, id="HTTP 500"),
    ],
)
async def test_a_watch_that_breaks_begins_again(
    broken: Answer, num_failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeAPIServer()
    server.breaks = [broken]
    async with watching(server, tmp_path, monkeypatch, "ns") as (task, noted), asyncio.timeout(LIMIT):
        while server.requests["watch"] < 2:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.05)

    assert set(noted) == {JobKey("ns", "first")}
    assert server.requests["failure"] == num_failures
    task.result()


async def test_a_watcher_that_ignores_its_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppojob_operator.handlers.watches._CANCEL_SECONDS", 0.05)

    async def reconnect() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def operator() -> None:
        """Do what Kopf does when it ends: cancel once, and wait."""
        watcher = asyncio.create_task(reconnect(), name="watcher for pods.v1@ns")
        await asyncio.sleep(0)
        watcher.cancel()
        await asyncio.wait([watcher])

    stopped = threading.Event()
    async with asyncio.timeout(LIMIT):
        await _ended(operator(), stopped)

    assert stopped.is_set()


async def wait_until(is_so: Callable[[], bool], watches: asyncio.Task[None]) -> None:
    """Wait, and fail if the watches end before."""
    while not is_so():
        assert not watches.done(), watches.exception()
        await asyncio.sleep(0.05)


async def test_each_namespace_of_the_list_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeAPIServer()
    async with watching(server, tmp_path, monkeypatch, "a", "b") as (task, noted), asyncio.timeout(LIMIT):
        await wait_until(lambda: set(noted) == {JobKey("a", "first"), JobKey("b", "first")}, task)
        await wait_until(lambda: server.watched == {"a": 1, "b": 1}, task)

    assert server.requests["failure"] == 0


@pytest.mark.parametrize("forbidden", ["a", "b", "ab"])
async def test_a_namespace_that_cannot_be_read_is_left_out_until_it_can(
    forbidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppojob_operator.handlers.watches._RESOURCE_SECONDS", 0.2)
    server = FakeAPIServer()
    server.forbidden = set(forbidden)
    async with watching(server, tmp_path, monkeypatch, "a", "b") as (task, noted), asyncio.timeout(LIMIT):
        await wait_until(lambda: {key.namespace for key in noted} == {"a", "b"} - set(forbidden), task)
        await wait_until(lambda: server.requests["refused probe"] >= 4, task)
        server.forbidden = set()
        await wait_until(lambda: {key.namespace for key in noted} == {"a", "b"}, task)

    assert server.requests["refused"] == server.requests["failure"] == 0


async def test_ray_clusters_are_watched_in_each_namespace_once_kuberay_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppojob_operator.handlers.watches._RESOURCE_SECONDS", 0.2)
    server = FakeAPIServer()
    server.has_kuberay = False
    async with watching(server, tmp_path, monkeypatch, "a", "b") as (task, noted), asyncio.timeout(LIMIT):
        await wait_until(lambda: len(set(noted)) == 2, task)
        await wait_until(lambda: server.requests["no KubeRay"] >= 4, task)
        assert server.requests["watch of RayClusters"] == 0
        server.has_kuberay = True
        await wait_until(lambda: server.requests["watch of RayClusters"] == 2, task)

    assert server.requests["failure"] == 0


async def test_the_loss_of_a_namespace_ends_the_watches_of_the_others_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(settings: Settings) -> kopf.OperatorSettings:
        configured = kopf_settings(settings)
        configured.networking.error_backoffs = (0.1,)
        return configured

    monkeypatch.setattr("ppojob_operator.handlers.watches.kopf_settings", impatient)
    monkeypatch.setattr("ppojob_operator.handlers.watches._RESOURCE_SECONDS", 0.2)
    server = FakeAPIServer()
    async with watching(server, tmp_path, monkeypatch, "a", "b") as (task, _), asyncio.timeout(LIMIT):
        await wait_until(lambda: server.watched == {"a": 1, "b": 1}, task)
        server.forbidden = {"a"}
        await wait_until(lambda: server.requests["failure"] == 1, task)
        # Until then, requests of the watches that end may be on their way.
        await wait_until(lambda: server.watched["b"] == 2, task)
        before = Counter(server.requests)
        await wait_until(lambda: server.requests["refused probe"] >= before["refused probe"] + 4, task)
        assert server.requests["refused"] == before["refused"]
        assert server.watched["a"] == 1
        server.forbidden = set()
        await wait_until(lambda: server.watched["a"] == 2, task)

    assert server.requests["failure"] == 1


async def test_with_a_selector_all_jobs_are_watched_and_namespaces_whose_labels_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeAPIServer()
    selector = {"matchLabels": {"ppojob.dev/enabled": "true"}}
    async with (
        watching(server, tmp_path, monkeypatch, selector=selector) as (task, _),
        asyncio.timeout(LIMIT),
    ):
        await wait_until(lambda: server.watched == {"": 1} and len(server.selectors) == 1, task)
        for number, kind in enumerate(("ADDED", "MODIFIED", "DELETED"), 1):
            server.labels.put_nowait(kind)
            await wait_until(lambda number=number: server.requests["changed namespace"] == number, task)  # type: ignore[misc]

    assert server.selectors == ["ppojob.dev/enabled=true"]
    assert server.requests["failure"] == 0


async def test_without_a_selector_no_namespace_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeAPIServer()
    async with watching(server, tmp_path, monkeypatch) as (task, _), asyncio.timeout(LIMIT):
        await wait_until(lambda: server.watched == {"": 1} and server.requests["watch of RayClusters"] == 1, task)

    assert server.requests["namespaces"] == 0, "the chart gives no right for it"
