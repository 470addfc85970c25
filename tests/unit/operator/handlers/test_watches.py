"""A real Kopf against a fake API server that breaks the watches."""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from ppojob_operator.cluster import Cluster
from ppojob_operator.handlers import Watches
from ppojob_operator.handlers.watches import _ended
from ppojob_operator.plan import JobKey
from ppojob_operator.settings import Settings
from tests.unit.operator.fake_api_server import connected

LIMIT = 60.0
JOB = {
    "apiVersion": "ppojob.dev/v1alpha1",
    "kind": "PPOJob",
    "metadata": {"namespace": "ns", "name": "first", "uid": "uid-1", "resourceVersion": "5"},
}
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
    """The API server: discovery, lists with one PPOJob, and watches that stay open; `breaks` are used up one by one."""

    def __init__(self) -> None:
        self.breaks: list[Answer] = []
        self.requests: Counter[str] = Counter()
        """Lists and watches of PPOJobs."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if path.endswith("/ppojobs"):
            is_watch = request.query.get("watch") == "true"
            self.requests["watch" if is_watch else "list"] += "limit" not in request.query or is_watch
            if is_watch and self.breaks:
                return await self.breaks.pop(0)(request)
            return await hold(request) if is_watch else web.json_response(collection([JOB]))
        if path.endswith(("/pods", "/rayclusters")):
            return await hold(request) if "watch" in request.query else web.json_response(collection([]))
        return web.json_response(discovery(path))


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
    server: FakeAPIServer, folder: Path, monkeypatch: pytest.MonkeyPatch
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
        cluster, settings = Cluster(api, reporter="test"), Settings(watch_namespace="ns")
        watches = Watches(settings, cluster, noted.append, lambda: server.requests.update(["failure"]))
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
    async with watching(server, tmp_path, monkeypatch) as (task, noted), asyncio.timeout(LIMIT):
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
    async with asyncio.timeout(10.0):
        await _ended(operator(), stopped)

    assert stopped.is_set()
