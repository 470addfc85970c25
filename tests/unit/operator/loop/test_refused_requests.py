"""Every request that the API server refuses, whatever its code, is in a condition, an Event and a metric.

The loop runs over a real client and an HTTP server that plays the API server: it has the objects that were written, and
answers one method of one resource with a code.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest
from aiohttp import web

from ppojob_api.v1alpha1.constants import LABEL_POOL, LABEL_RAY_CLUSTER, Condition, Reason
from ppojob_operator import loop as loop_module
from ppojob_operator.api_server import Answer, ApiServer
from ppojob_operator.cluster import Cluster
from ppojob_operator.loop import Hooks, Loop
from ppojob_operator.plan import JobNetwork, Ray, RayJob, RayState, Submission, Surroundings
from ppojob_operator.settings import DashboardAccess, Settings
from ppojob_operator.status_server.metrics import OperatorMetrics
from tests.unit.operator.fake_api_server import connected
from tests.unit.operator.loop.memory_cluster import GOOD, SPEC

NO_ANSWER = 0
CODES = (400, 401, 403, 404, 409, 413, 422, 429, 500, 503)
QUEUED = {**SPEC, "runPolicy": {"queueName": "gpus"}}
TEMPLATED = {**SPEC, "templateRef": {"kind": "PPOJobTemplate", "name": "team"}}
FETCHED = {**SPEC, "model": {"actor": {"path": "hf://Qwen/Qwen3-8B"}}}
WORDS = "admission webhook says no"
RACED = " was being written"
"""Of an object that changed at each try."""
JOB = "/ppojobs/good"


class Player:
    """An API server in memory."""

    def __init__(self, spec: dict[str, Any]) -> None:
        metadata = {"namespace": GOOD.namespace, "name": GOOD.name, "uid": "uid-good", "generation": 1}
        self.objects: dict[str, dict[str, Any]] = {
            JOB: {"metadata": metadata, "spec": spec},
            "/persistentvolumeclaims/data": {"metadata": {"name": "data"}, "status": {"phase": "Bound"}},
        }
        self.version = 1
        self.refused: tuple[str, str, int] | None = None
        """Method, resource and code. 0: there is no answer."""
        self.only_dry_runs = False
        """Dry runs alone are refused."""
        self.num_dry_runs = 0
        self.events: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request."""
        path = request.path.partition(f"/namespaces/{GOOD.namespace}")[2]
        if self.refused is not None:
            method, resource, code = self.refused
            is_status = path.endswith("/status")
            found = f"{path.split('/')[1]}/status" if is_status else path.split("/")[1]
            is_meant = "dryRun" in request.query or not self.only_dry_runs
            if is_meant and (request.method, found) == (method, resource):
                if code == NO_ANSWER:
                    await asyncio.sleep(1)
                return web.json_response({"message": WORDS}, status=code)
        if "dryRun" in request.query:
            self.num_dry_runs += 1
            return web.json_response(json.loads(await request.text()), status=201)
        answer: dict[str, Any] | None = await getattr(self, f"_{request.method.lower()}")(path, request)
        if answer is None:
            return web.json_response({"message": f"{path} not found"}, status=404)
        return web.json_response(answer, status=201 if request.method == "POST" else 200)

    async def _get(self, path: str, request: web.Request) -> dict[str, Any] | None:
        if path.count("/") > 1:
            found = self.objects.get(path)
            if found is not None:
                found["metadata"]["resourceVersion"] = str(self.version)
            return found
        return {"items": [each for name, each in self.objects.items() if name.startswith(f"{path}/")]}

    async def _post(self, path: str, request: web.Request) -> dict[str, Any]:
        sent: dict[str, Any] = json.loads(await request.text())
        if path == "/events":
            self.events.append(sent)
        else:
            self.objects[f"{path}/{sent['metadata']['name']}"] = sent
        return sent

    async def _patch(self, path: str, request: web.Request) -> dict[str, Any]:
        sent: dict[str, Any] = json.loads(await request.text())
        if path == f"{JOB}/status":
            self.objects[JOB]["status"] = sent["status"]
        else:
            self.objects[path] = sent
        self.version += 1
        return sent

    async def _delete(self, path: str, request: web.Request) -> dict[str, Any]:
        self.objects.pop(path, None)
        return {}

    def start_pods(self) -> None:
        """Let KubeRay create a Service and the pods of the job's RayCluster, which are ready."""
        [cluster] = [each for path, each in self.objects.items() if path.startswith("/rayclusters/")]
        cluster["status"] = {"head": {"serviceName": "good-head-svc"}}
        for pool in ("", "actor"):
            labels = {LABEL_RAY_CLUSTER: cluster["metadata"]["name"], **({LABEL_POOL: pool} if pool else {})}
            metadata = {"name": f"good-{pool}", "namespace": GOOD.namespace, "labels": labels}
            status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            self.objects[f"/pods/good-{pool}"] = {"metadata": metadata, "status": status}

    @property
    def conditions(self) -> dict[str, dict[str, Any]]:
        """The conditions of the job, by type."""
        return {each["type"]: each for each in self.objects[JOB].get("status", {}).get("conditions", [])}


class Dashboard:
    """Ray, which runs what it gets."""

    def __init__(self) -> None:
        self._jobs: tuple[RayJob, ...] = ()

    async def list_jobs(self, address: object) -> Ray:
        return Ray(self._jobs)

    async def submit(self, address: object, submission: Submission) -> None:
        self._jobs += (RayJob(submission.submission_id, RayState.RUNNING, metadata=submission.metadata),)


@asynccontextmanager
async def looping(player: Player, metrics: OperatorMetrics) -> AsyncIterator[Loop]:
    """Yield a loop over the player."""
    network = JobNetwork("ppojob-system", {})
    surroundings = Surroundings("https://operator", "PEM", b"k" * 32, network)
    async with connected(player.handle) as api:
        counted = ApiServer(api._client, timeout=120.0, count=metrics.count_api_request)
        cluster, settings = Cluster(counted, reporter="pod-1"), Settings(dashboard_access=DashboardAccess.SERVICE)
        yield Loop(settings, cluster, Dashboard(), lambda key: surroundings, Hooks())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop retry at once."""
    for name in ("_BURST", "_FIRST_PAUSE", "_IDLE_TICK"):
        monkeypatch.setattr(loop_module, name, 0.01)


def shown(player: Player) -> dict[str, Any] | None:
    """Return the condition that has the API server's answer, if there is one."""
    said = (WORDS, RACED)
    return next((each for each in player.conditions.values() if any(word in each["message"] for word in said)), None)


async def until(loop: Loop, found: Callable[[], Any]) -> Any:
    """Run the loop until something is found, and return it."""
    loop.enqueue(GOOD)
    stop = asyncio.Event()
    running = asyncio.create_task(loop.run(stop))
    try:
        async with asyncio.timeout(60):
            while (answer := found()) is None:
                await asyncio.sleep(0.01)
            # The Event is written after the status.
            await asyncio.sleep(0.05)
    finally:
        stop.set()
        await running
    return answer


WRITES = [
    (SPEC, "PATCH", "rayclusters"),
    (SPEC, "PATCH", "configmaps"),
    (SPEC, "PATCH", "serviceaccounts"),
    (SPEC, "PATCH", "networkpolicies"),
    (SPEC, "POST", "secrets"),
    (FETCHED, "PATCH", "jobs"),
]
READS = [
    (SPEC, "GET", "pods"),
    (SPEC, "GET", "configmaps"),
    (SPEC, "GET", "persistentvolumeclaims"),
    (SPEC, "GET", "rayclusters"),
    (FETCHED, "GET", "jobs"),
    (QUEUED, "GET", "workloads"),
    (TEMPLATED, "GET", "ppojobtemplates"),
]
NO_ERRORS = {("GET", "configmaps", 404), ("GET", "persistentvolumeclaims", 404), ("GET", "rayclusters", 404),
             ("GET", "jobs", 404), ("GET", "workloads", 404), ("GET", "ppojobtemplates", 404),
             ("POST", "secrets", 409)}  # fmt: skip
"""Answers that say something: an object does not exist, or exists already."""


REFUSED = [
    pytest.param(spec, method, resource, code, id=f"{method}-{resource}-{code}")
    for (spec, method, resource), code in product([*WRITES, *READS], CODES)
    if (method, resource, code) not in NO_ERRORS
]


@pytest.mark.parametrize(("spec", "method", "resource", "code"), REFUSED)
async def test_a_refused_request_is_a_condition_an_event_and_a_metric(
    spec: dict[str, Any], method: str, resource: str, code: int
) -> None:
    player, metrics = Player(spec), OperatorMetrics()
    player.refused = (method, resource, code)

    async with looping(player, metrics) as loop:
        condition = await until(loop, lambda: shown(player))

    assert condition["status"] != "True"
    assert condition["reason"] in (Reason.CLUSTER_REFUSED, Reason.API_REQUEST_FAILED, Reason.FETCHING)
    assert [event for event in player.events if event["message"][:900] == condition["message"][:900]]
    labels = {"method": method, "resource": resource, "code": str(code)}
    assert metrics.registry.get_sample_value("ppojob_api_requests_total", labels)


DRY_RUNS = [("PATCH", "rayclusters"), ("POST", "pods")]
UNANSWERED = (429, 503, NO_ANSWER)
"""Codes that ask for another try, and no answer: they say nothing about the layout."""


def give_up_dry_runs(loop: Loop, method: str) -> None:
    """Let the client give up dry runs of one method after half a second; others take longer on a busy machine."""
    api, call, patience = loop._cluster._api, loop._cluster._api.call, loop._cluster._api._timeout

    async def call_with_limit(*arguments: Any, query: Mapping[str, str] | None = None, **options: Any) -> Answer:
        api._timeout = 0.5 if arguments[0] == method and "dryRun" in (query or {}) else patience
        return await call(*arguments, query=query, **options)

    api.call = call_with_limit  # type: ignore[method-assign]


@pytest.mark.parametrize("code", [*CODES, NO_ANSWER])
@pytest.mark.parametrize(("method", "resource"), DRY_RUNS)
async def test_a_refused_dry_run_is_a_condition_an_event_and_a_metric_and_the_trainer_runs_on(
    method: str, resource: str, code: int
) -> None:
    player, metrics = Player(SPEC), OperatorMetrics()
    async with looping(player, metrics) as loop:
        await loop.reconcile(GOOD)
        player.start_pods()
        for _ in range(3):
            loop._observer.drop(GOOD)
            await loop.reconcile(GOOD)
        assert player.conditions[Condition.SUBMITTED]["status"] == "True"
        before = player.objects[JOB]["status"]["rayCluster"]["name"]

        player.objects[JOB]["spec"] = {**SPEC, "image": "trainer:2"}
        player.objects[JOB]["metadata"]["generation"] = 2
        player.refused, player.only_dry_runs = (method, resource, code), True
        if code == NO_ANSWER:
            give_up_dry_runs(loop, method)
        condition = await until(loop, lambda: player.conditions.get(Condition.LAYOUT_APPLIED))

    is_unanswered = code in UNANSWERED
    found = (condition["status"], condition["reason"])
    assert found == (("Unknown", Reason.API_REQUEST_FAILED) if is_unanswered else ("False", Reason.INVALID_SPEC))
    assert ("no answer within" if code == NO_ANSWER else WORDS) in condition["message"]
    assert [event for event in player.events if event["message"][:900] == condition["message"][:900]]
    labels = {"method": method, "resource": resource, "code": str(code) if code else "error"}
    assert metrics.registry.get_sample_value("ppojob_api_requests_total", labels)
    status = player.objects[JOB]["status"]
    assert "stop" not in status
    assert status["rayCluster"]["name"] == before
    assert player.conditions[Condition.SUBMITTED]["status"] == "True"


async def test_a_layout_whose_dry_runs_succeed_stops_the_trainer() -> None:
    player = Player(SPEC)
    async with looping(player, OperatorMetrics()) as loop:
        await loop.reconcile(GOOD)
        player.start_pods()
        for _ in range(3):
            loop._observer.drop(GOOD)
            await loop.reconcile(GOOD)
        player.objects[JOB]["spec"] = {**SPEC, "image": "trainer:2"}
        player.objects[JOB]["metadata"]["generation"] = 2
        await loop.reconcile(GOOD)

    assert player.num_dry_runs == 3, "the RayCluster, its head and a pod of its pool"
    assert player.objects[JOB]["status"]["stop"]["reason"] == Reason.REALLOCATING


@pytest.mark.parametrize("code", CODES)
async def test_a_refused_status_is_an_event_and_a_metric(code: int) -> None:
    player, metrics = Player(SPEC), OperatorMetrics()
    async with looping(player, metrics) as loop:
        await loop.reconcile(GOOD)
        player.refused = ("PATCH", "ppojobs/status", code)
        # Something to write.
        player.objects[JOB]["spec"] = {**SPEC, "pools": []}
        said = await until(
            loop, lambda: next((each for each in player.events if each["reason"] == Reason.API_REQUEST_FAILED), None)
        )

    assert (RACED if code in (404, 409) else WORDS) in said["message"]
    labels = {"method": "PATCH", "resource": "ppojobs/status", "code": str(code)}
    assert metrics.registry.get_sample_value("ppojob_api_requests_total", labels)


@pytest.mark.parametrize("code", CODES)
async def test_a_refused_event_is_a_metric_and_the_condition_has_its_words(code: int) -> None:
    player, metrics = Player({**SPEC, "storage": {"claimName": "none"}}), OperatorMetrics()
    player.refused = ("POST", "events", code)

    async with looping(player, metrics) as loop:
        condition = await until(loop, lambda: player.conditions.get(Condition.ACCEPTED))

    assert player.events == []
    assert condition["reason"] == Reason.STORAGE_MISSING
    labels = {"method": "POST", "resource": "events", "code": str(code)}
    assert metrics.registry.get_sample_value("ppojob_api_requests_total", labels)


async def test_a_refusal_that_has_passed_is_no_condition_any_more() -> None:
    player = Player({**SPEC, "storage": {"claimName": "none"}})
    player.refused = ("GET", "pods", 403)
    async with looping(player, OperatorMetrics()) as loop:
        condition = await until(loop, lambda: shown(player))
        player.refused = None
        await loop.reconcile(GOOD)

    assert condition["reason"] == Reason.API_REQUEST_FAILED
    assert player.conditions[Condition.PROGRESSING]["reason"] == Reason.STORAGE_MISSING


@pytest.mark.parametrize("code", [code for code in CODES if code not in (404, 409)])
async def test_a_refused_deletion_is_shown_until_nothing_is_left_to_delete(code: int) -> None:
    player, metrics = Player(SPEC), OperatorMetrics()
    async with looping(player, metrics) as loop:
        await loop.reconcile(GOOD)
        # The spec of a job that has started cannot be run any more, so it fails and its RayCluster is deleted.
        player.objects[JOB]["spec"] = {**SPEC, "trainer": {"totalSteps": -1}}
        player.refused = ("DELETE", "rayclusters", code)
        condition = await until(loop, lambda: shown(player))
        assert condition["type"] == Condition.PROGRESSING
        assert player.conditions[Condition.FAILED]["reason"] == Reason.INVALID_SPEC

        player.refused = None
        await loop.reconcile(GOOD)
        assert shown(player)
        # The watch reports the deletion.
        await loop.reconcile(GOOD)

    assert [path for path in player.objects if path.startswith("/rayclusters/")] == []
    assert player.conditions[Condition.PROGRESSING]["reason"] == Reason.INVALID_SPEC
    assert [event for event in player.events if event["message"][:900] == condition["message"][:900]]


@pytest.mark.parametrize("code", [code for code in CODES if code not in (404, 409)])
async def test_a_fetch_that_cannot_be_ended_is_shown_until_it_is(code: int) -> None:
    player = Player(FETCHED)
    async with looping(player, OperatorMetrics()) as loop:
        await loop.reconcile(GOOD)
        assert [path for path in player.objects if path.startswith("/jobs/")]
        player.objects[JOB]["spec"] = {**FETCHED, "runPolicy": {"suspend": True}}
        player.refused = ("DELETE", "jobs", code)
        condition = await until(loop, lambda: shown(player))

        player.refused = None
        await loop.reconcile(GOOD)

    assert [path for path in player.objects if path.startswith("/jobs/")] == []
    assert [event for event in player.events if event["message"][:900] == condition["message"][:900]]


@pytest.mark.parametrize("code", [code for code in CODES if code not in (404, 409)])
async def test_a_job_that_may_not_be_deleted_after_its_time_says_so(code: int) -> None:
    player = Player({**SPEC, "runPolicy": {"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 0}})
    player.refused = ("DELETE", "ppojobs", code)
    async with looping(player, OperatorMetrics()) as loop:
        condition = await until(loop, lambda: shown(player))

    assert player.conditions[Condition.FAILED]["reason"] == Reason.ACTIVE_DEADLINE_EXCEEDED
    assert condition["type"] == Condition.PROGRESSING
    assert [event for event in player.events if event["message"][:900] == condition["message"][:900]]
