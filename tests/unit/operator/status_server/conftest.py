"""A PPOJob, its pod, and an API server that knows both, for the status server's tests."""

import base64
import copy
import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import ProgressReply, progress_audience
from ppojob_operator.api_server import ApiUnavailable, RawObject, StatusOf
from ppojob_operator.status_server import JobIdentity, OperatorMetrics, StatusServerSettings, TokenIdentity
from ppojob_operator.status_server.authentication import Authenticator, TokenReviews
from ppojob_operator.status_server.intake import Intake
from ppojob_operator.status_server.limits import ConnectionLimits
from ppojob_operator.status_server.refusals import Refusal
from ppojob_operator.status_server.writer import ProgressWriter
from tests.ports import server_port

KEY = JobIdentity("rl-team", "arithmetic", "uid-1")
CLUSTER = "arithmetic-1a2b3"
SOURCE = "10.0.0.1"
OPERATOR_VERSION = "0.3.0"
Send = Callable[..., Awaitable[ProgressReply]]


POD_CLAIM = {
    "namespace": KEY.namespace,
    "pod": {"name": "arithmetic-head", "uid": "pod-1"},
    "serviceaccount": {"name": "arithmetic-trainer", "uid": "account-1"},
}


def make_token(signature: str = "good", *, kubernetes: Any = POD_CLAIM, **changes: Any) -> str:
    """Return a token like a kubelet's for the job's head pod; `changes` replace claims, None removes one.

    `kubernetes` is the claim of that name, which says which pod the token is for.
    """
    claims = {
        "aud": [progress_audience(*KEY)],
        "exp": 2**32,
        "iss": "https://kubernetes.default.svc",
        "kubernetes.io": kubernetes,
        "sub": f"system:serviceaccount:{KEY.namespace}:arithmetic-trainer",
        **changes,
    }
    present = {name: value for name, value in claims.items() if value is not None}
    parts = [json.dumps({"alg": "RS256", "kid": "1"}), json.dumps(present), signature]
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)


TOKEN = make_token()


class FakeCluster:
    """Both ports, in memory. `errors` are raised one by one by the calls of that name."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.tokens: dict[tuple[str, str], TokenIdentity] = {}
        self.secrets: dict[tuple[str, str], dict[str, Any]] = {}
        self.writes: list[tuple[JobIdentity, dict[str, Any]]] = []
        self.reviews = 0
        self.job_reads = 0
        self.errors: dict[str, Iterator[Exception | None]] = {}
        self.before_write: Callable[[], Any] | None = None

    def _fail(self, name: str) -> None:
        error = next(self.errors.get(name, iter(())), None)
        if error:
            raise error

    async def review_token(self, token: str, audience: str) -> TokenIdentity | None:
        self.reviews += 1
        self._fail("review_token")
        return self.tokens.get((token, audience))

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        return self.pods.get((namespace, name))

    async def read_job(self, namespace: str, name: str) -> dict[str, Any] | None:
        self.job_reads += 1
        self._fail("read_job")
        return self.jobs.get((namespace, name))

    async def apply_progress(self, key: JobIdentity, status_of: StatusOf) -> bool:
        if self.before_write:
            await self.before_write()
        self._fail("apply_progress")
        job = self.jobs.get((key.namespace, key.name))
        status = status_of(job or {})
        if status is not None:
            self.writes.append((key, dict(status)))
        return job is not None and job["metadata"]["uid"] == key.uid

    async def read_secret(self, namespace: str, name: str) -> dict[str, Any] | None:
        self._fail("read_secret")
        return copy.deepcopy(self.secrets.get((namespace, name)))

    async def create_secret(self, secret: RawObject) -> bool:
        self._fail("create_secret")
        place = (secret["metadata"]["namespace"], secret["metadata"]["name"])
        if place in self.secrets:
            return False
        return self._store(place, secret, 1)

    async def replace_secret(self, secret: RawObject) -> bool:
        self._fail("replace_secret")
        place = (secret["metadata"]["namespace"], secret["metadata"]["name"])
        version = self.secrets[place]["metadata"]["resourceVersion"]
        if secret["metadata"]["resourceVersion"] != version:
            return False
        return self._store(place, secret, int(version) + 1)

    def _store(self, place: tuple[str, str], secret: RawObject, version: int) -> bool:
        stored = copy.deepcopy(dict(secret))
        stored["metadata"]["resourceVersion"] = str(version)
        self.secrets[place] = stored
        return True


@pytest.fixture
def key() -> JobIdentity:
    return KEY


@pytest.fixture
def job() -> dict[str, Any]:
    """A running job in its attempt 2, as the API server has it, defaults included."""
    return {
        "metadata": {"namespace": KEY.namespace, "name": KEY.name, "uid": KEY.uid, "generation": 1},
        "spec": {
            "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
            "trainer": {"totalSteps": 120, "validateEverySteps": 10, "seed": 1},
            "checkpoint": {"everySteps": 50, "keep": 2, "export": "Final"},
        },
        "status": {
            "attempt": 2,
            "conditions": [{"type": "Accepted", "status": "True"}],
            "rayCluster": {"name": CLUSTER},
        },
    }


@pytest.fixture
def pod() -> dict[str, Any]:
    """The head pod of the job."""
    metadata = {
        "name": "arithmetic-head",
        "uid": "pod-1",
        "labels": {constants.LABEL_JOB: KEY.name, constants.LABEL_RAY_CLUSTER: CLUSTER},
        "ownerReferences": [{"kind": "RayCluster", "name": CLUSTER, "uid": "cluster-1", "controller": True}],
    }
    return {"metadata": metadata, "status": {"phase": "Running"}}


@pytest.fixture
def identity() -> TokenIdentity:
    """Whom the pod's projected token stands for."""
    return TokenIdentity(
        username="system:serviceaccount:rl-team:arithmetic-trainer",
        audiences=(progress_audience(*KEY),),
        pod_name="arithmetic-head",
        pod_uid="pod-1",
    )


@pytest.fixture
def cluster(job: dict[str, Any], pod: dict[str, Any], identity: TokenIdentity) -> FakeCluster:
    """An API server with the job, its pod and its token."""
    fake = FakeCluster()
    fake.jobs[KEY.namespace, KEY.name] = job
    fake.pods[KEY.namespace, "arithmetic-head"] = pod
    fake.tokens[TOKEN, progress_audience(*KEY)] = identity
    return fake


@pytest.fixture
def authorization() -> str:
    return f"Bearer {TOKEN}"


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of attempt 2 in the middle of the run, as the trainer sends it."""
    return {
        "uid": KEY.uid,
        "attempt": 2,
        "number": 17,
        "activity": "Training",
        "step": 12,
        "totalSteps": 120,
        "etaSeconds": 639.6,
        "reward": 0.412345,
        "firstValidationReward": 0.2,
        "firstStepTime": "2026-01-31T12:00:00Z",
        "metrics": {"actor/lr": 1e-6, "critic/score/mean": 0.412345, "my/own": 3.0},
        "pools": [{"name": "actor", "busyFraction": 0.91}, {"name": "stranger", "busyFraction": 0.5}],
        "checkpoint": {
            "step": 10,
            "path": "/data/ppojob/rl-team/arithmetic/checkpoints/10",
            "time": "2026-01-31T12:01:00Z",
        },
    }


@pytest.fixture
def unavailable() -> ApiUnavailable:
    return ApiUnavailable("GET /x: no answer within 10 s")


class Clock:
    """A clock that advances on request."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(cluster: Any, clock: Clock) -> ProgressWriter:
    return ProgressWriter(cluster, OperatorMetrics(), interval_seconds=10, clock=clock)


@pytest.fixture
def send(cluster: Any, clock: Clock, writer: ProgressWriter, report: dict[str, Any], authorization: str) -> Send:
    reviews = TokenReviews(cluster, cache_seconds=60, clock=clock)
    authenticator = Authenticator(cluster, reviews, lambda job: f"{job}-trainer", lambda job: f"{job}-fetch")
    arrival = datetime(2026, 1, 31, 12, 5, tzinfo=UTC)
    intake = Intake(
        cluster, authenticator, writer, write_limit_seconds=0.2, version=OPERATOR_VERSION, clock=lambda: arrival
    )

    async def send(
        namespace: str = "rl-team",
        name: str = "arithmetic",
        *,
        header: str | None = authorization,
        body: bytes | None = None,
        **changes: Any,
    ) -> ProgressReply:
        sent = json.dumps({**report, **changes}).encode() if body is None else body
        caller = await intake.identify(header, namespace, name, SOURCE)
        return await intake.receive(caller, sent)

    return send


async def refusal_of(answer: Awaitable[ProgressReply]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await answer
    return caught.value


@pytest.fixture
def settings() -> StatusServerSettings:
    """The settings of a whole server on loopback. No limit of time ends a request, however busy the machine is."""
    return StatusServerSettings(
        namespace="system",
        service_name="ppojob-operator",
        host="127.0.0.1",
        port=server_port(),
        probe_port=server_port(),
        extra_names=("localhost", "127.0.0.1"),
        request_timeout_seconds=240.0,
        connections=ConnectionLimits(seconds=240.0),
    )
