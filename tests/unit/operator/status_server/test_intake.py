"""Which reports are taken, and how the others are refused."""

import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import Command, ProgressReply, progress_audience
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.status_server import JobIdentity, OperatorMetrics, TokenIdentity
from ppojob_operator.status_server.authentication import Authenticator, TokenReviews
from ppojob_operator.status_server.intake import Intake, parse_report
from ppojob_operator.status_server.refusals import Refusal
from ppojob_operator.status_server.writer import ProgressWriter

Send = Callable[..., Awaitable[ProgressReply]]


class Clock:
    """Seconds that pass when told to."""

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
    intake = Intake(cluster, authenticator, writer, write_limit_seconds=0.2, clock=lambda: arrival)

    async def send(
        namespace: str = "rl-team",
        name: str = "arithmetic",
        *,
        header: str | None = authorization,
        body: bytes | None = None,
        **changes: Any,
    ) -> ProgressReply:
        sent = json.dumps({**report, **changes}).encode() if body is None else body
        return await intake.receive(namespace, name, header, sent)

    return send


async def refusal_of(answer: Awaitable[ProgressReply]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await answer
    return caught.value


async def test_a_good_report_is_kept_for_the_status_and_answered(
    send: Send, cluster: Any, writer: ProgressWriter, key: JobIdentity
) -> None:
    reply = await send()

    assert reply.command is Command.NONE
    assert reply.settings
    assert reply.settings.total_steps == 120
    assert await writer.flush(1) == 0
    [(written, status)] = cluster.writes
    assert written == key
    assert status["progress"]["lastUpdateTime"] == "2026-01-31T12:05:00Z"


async def test_a_newer_trainer_may_report_what_this_operator_does_not_know(
    send: Send, cluster: Any, writer: ProgressWriter
) -> None:
    checkpoint = {"step": 1, "path": "/x", "time": "2026-01-31T12:00:00Z", "shards": 8}

    await send(newField=1, checkpoint=checkpoint, trainerVersion="0.9.0")

    assert await writer.flush(1) == 0
    [(_, status)] = cluster.writes
    assert status["checkpoint"]["step"] == 1
    assert status["progress"]["trainerVersion"] == "0.9.0"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body: "),
        (b"{", "body: "),
        (b"[]", "body: "),
        (b"\xff\xfe", "body: "),
        (b"{}", "uid: Field required; attempt: Field required; activity: Field required; totalSteps: Field required"),
        ({"step": -1}, "step: "),
        ({"activity": "Dreaming"}, "activity: "),
        ({"reward": float("nan")}, "reward: "),
        ({"metrics": {f"m{n}": 1.0 for n in range(65)}}, "metrics: "),
        ({"pools": [{"name": "actor", "busyFraction": 1.5}]}, "pools[0].busyFraction: "),
        ({"firstStepTime": "yesterday"}, "firstStepTime: 'yesterday' is no RFC 3339 time"),
        ({"firstStepTime": "2026-01-31T12:00:00"}, "firstStepTime: "),
        ({"checkpoint": {"step": 1, "path": "/x", "time": "noon"}}, "checkpoint.time: 'noon'"),
    ],
)
async def test_a_malformed_report_is_refused_with_the_field_that_is_wrong(
    send: Send, body: bytes | dict[str, Any], words: str
) -> None:
    sent = send(body=body) if isinstance(body, bytes) else send(**body)

    refusal = await refusal_of(sent)

    assert (refusal.status, refusal.reason) == (400, "Malformed")
    assert refusal.message.startswith(words)
    assert refusal.message.endswith("send a ProgressReport of ppojob.dev/v1alpha1 as JSON")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", "Basic dXNlcg==", "good-token"])
async def test_a_request_without_a_token_is_refused(send: Send, cluster: Any, header: str | None) -> None:
    refusal = await refusal_of(send(header=header))

    assert (refusal.status, refusal.headers) == (401, {"WWW-Authenticate": "Bearer"})
    assert cluster.reviews == 0


async def test_a_token_for_another_audience_is_refused_and_not_repeated_in_the_answer(send: Send) -> None:
    refusal = await refusal_of(send(header="Bearer secret-of-another"))

    assert (refusal.status, refusal.reason) == (401, "Unauthenticated")
    assert "ppojob.dev/rl-team/arithmetic/uid-1" in refusal.message
    assert "secret" not in refusal.message


async def test_the_token_of_one_job_is_worth_nothing_for_another(send: Send, cluster: Any, job: dict[str, Any]) -> None:
    other = copy.deepcopy(job)
    other["metadata"] |= {"name": "other", "uid": "uid-2"}
    cluster.jobs["rl-team", "other"] = other

    refusal = await refusal_of(send(name="other", uid="uid-2"))

    assert refusal.status == 401


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"audiences": ()}, "not valid"),
        ({"username": "system:serviceaccount:rl-team:default"}, "system:serviceaccount:rl-team:default"),
        ({"username": "system:serviceaccount:elsewhere:arithmetic-trainer"}, "rl-team:arithmetic-trainer"),
        ({"pod_uid": None}, "not bound to a pod"),
        ({"pod_name": None}, "not bound to a pod"),
        ({"pod_uid": "pod-0"}, "gone"),
        ({"pod_name": "no-such-pod"}, "gone"),
    ],
)
async def test_a_token_of_somebody_else_is_refused(
    send: Send, cluster: Any, identity: TokenIdentity, key: JobIdentity, change: dict[str, Any], words: str
) -> None:
    cluster.tokens["good-token", progress_audience(*key)] = replace(identity, **change)

    refusal = await refusal_of(send())

    assert refusal.status == (401 if "audiences" in change else 403)
    assert words in refusal.message


async def test_a_job_with_a_service_account_of_the_users_is_reported_for_by_that_one_alone(
    send: Send, cluster: Any, job: dict[str, Any], identity: TokenIdentity, key: JobIdentity
) -> None:
    job["spec"]["serviceAccountName"] = "bucket-reader"
    assert (await refusal_of(send())).status == 403

    own = replace(identity, username="system:serviceaccount:rl-team:bucket-reader")
    cluster.tokens["good-token", progress_audience(*key)] = own
    # Another token in the same words would be answered from memory.
    cluster.tokens["second-token", progress_audience(*key)] = own

    assert (await send(header="Bearer second-token")).command is Command.NONE


@pytest.mark.parametrize(
    ("labels", "phase"),
    [({}, "Running"), ({"ppojob.dev/job": "other"}, "Running"), (None, "Succeeded"), (None, "Failed")],
)
async def test_a_pod_that_is_not_the_jobs_or_has_ended_is_refused(
    send: Send, pod: dict[str, Any], labels: dict[str, str] | None, phase: str
) -> None:
    pod["status"]["phase"] = phase
    if labels is not None:
        pod["metadata"]["labels"] = labels

    assert (await refusal_of(send())).status == 403


def by(*clusters: str) -> list[dict[str, Any]]:
    """Return owner references of a pod."""
    return [{"kind": "RayCluster", "name": name, "controller": True} for name in clusters]


@pytest.mark.parametrize(
    ("label", "owners"),
    [
        ("arithmetic-0f0f0", by("arithmetic-0f0f0")),  # Of an earlier attempt.
        ("arithmetic-1a2b3", by("arithmetic-0f0f0")),
        ("arithmetic-0f0f0", by("arithmetic-1a2b3")),
        ("arithmetic-1a2b3", []),
        ("arithmetic-1a2b3", [{"kind": "ReplicaSet", "name": "arithmetic-1a2b3"}]),
        ("arithmetic-1a2b3", by("arithmetic-1a2b3", "arithmetic-0f0f0")),
        (None, by("arithmetic-1a2b3")),
    ],
)
async def test_a_pod_of_another_ray_cluster_than_the_attempts_is_refused(
    send: Send, pod: dict[str, Any], label: str | None, owners: list[dict[str, Any]]
) -> None:
    pod["metadata"]["labels"]["ray.io/cluster"] = label
    pod["metadata"]["ownerReferences"] = owners

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (403, "Forbidden")
    assert refusal.message.endswith("reports of rl-team/arithmetic come from arithmetic-1a2b3")


async def test_between_two_ray_clusters_nobody_reports_and_an_old_trainer_hears_that_it_was_replaced(
    send: Send, job: dict[str, Any]
) -> None:
    del job["status"]["rayCluster"]

    assert (await refusal_of(send(attempt=1))).reason == "StaleAttempt"
    assert (await refusal_of(send())).status == 403


async def test_a_pod_in_its_grace_period_may_still_report_its_last_checkpoint(send: Send, pod: dict[str, Any]) -> None:
    pod["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"

    assert (await send()).command is Command.NONE


async def test_a_pod_that_is_gone_is_refused_though_its_token_is_remembered(send: Send, cluster: Any) -> None:
    await send()
    cluster.pods.clear()

    assert (await refusal_of(send())).status == 403


async def test_a_job_that_is_gone_is_named(send: Send, cluster: Any) -> None:
    cluster.jobs.clear()

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (404, "JobNotFound")
    assert "rl-team/arithmetic" in refusal.message


async def test_a_report_for_an_earlier_object_of_the_same_name_is_refused(send: Send, job: dict[str, Any]) -> None:
    job["metadata"]["uid"] = "uid-9"

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (409, "OtherObject")


@pytest.mark.parametrize(("attempt", "is_taken"), [(0, False), (1, False), (2, True)])
async def test_an_attempt_that_was_replaced_is_fenced_out(send: Send, attempt: int, is_taken: bool) -> None:
    if is_taken:
        await send(attempt=attempt)
        return

    refusal = await refusal_of(send(attempt=attempt))

    assert (refusal.status, refusal.reason) == (409, "StaleAttempt")
    assert "replaced by attempt 2" in refusal.message


@pytest.mark.parametrize("attempt", [3, 10**9])
async def test_an_attempt_that_has_not_begun_is_refused_and_hides_nothing(
    send: Send, cluster: Any, writer: ProgressWriter, attempt: int
) -> None:
    refusal = await refusal_of(send(attempt=attempt))
    assert (refusal.status, refusal.reason) == (422, "UnknownAttempt"), "409 and 410 would stop a trainer"
    assert refusal.message.startswith(f"attempt {attempt} of PPOJob rl-team/arithmetic has not begun")

    await send()
    assert await writer.flush(1) == 0
    [(_, status)] = cluster.writes
    assert status["progress"]["attempt"] == 2


async def test_the_first_report_may_come_before_the_attempt_is_in_the_status(send: Send, job: dict[str, Any]) -> None:
    del job["status"]["attempt"]

    assert (await send(attempt=0)).settings


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
async def test_a_finished_job_takes_no_more_reports(send: Send, job: dict[str, Any], condition: str) -> None:
    job["status"]["conditions"].append({"type": condition, "status": "True"})

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.reason) == (410, "JobFinished")
    assert condition in refusal.message


@pytest.mark.parametrize("call", ["review_token", "read_job"])
@pytest.mark.parametrize("error", [ApiUnavailable("no answer"), ApiRefused("403 forbidden")])
async def test_an_api_server_that_does_not_answer_lets_the_trainer_go_on(
    send: Send, cluster: Any, call: str, error: Exception
) -> None:
    cluster.errors[call] = iter([error])

    refusal = await refusal_of(send())

    assert (refusal.status, refusal.headers) == (503, {"Retry-After": "10"})
    assert "go on training" in refusal.message
    assert (await send()).settings


async def test_a_token_is_reviewed_once_in_a_while(send: Send, cluster: Any, clock: Clock) -> None:
    for clock.now in (0, 30, 59.9):
        await send()
    assert cluster.reviews == 1

    clock.now = 60
    await send()
    assert cluster.reviews == 2


async def test_a_refused_token_is_remembered_for_a_shorter_time(send: Send, cluster: Any, clock: Clock) -> None:
    for clock.now in (0, 9.9, 10.0):
        assert (await refusal_of(send(header="Bearer bad"))).status == 401

    assert cluster.reviews == 2


async def test_a_flood_of_tokens_does_not_grow_the_memory(cluster: Any, key: JobIdentity) -> None:
    reviews = TokenReviews(cluster, cache_seconds=60)

    for number in range(5000):
        await reviews.review(f"token-{number}", progress_audience(*key))

    assert len(reviews._cached) == 4096


async def test_the_last_report_is_answered_only_once_it_is_written(send: Send, cluster: Any) -> None:
    refusal = await refusal_of(send(activity="Finished"))  # No writer runs.

    assert refusal.status == 503
    assert "send it again" in refusal.message


def test_a_report_without_the_optional_parts_is_a_report() -> None:
    report = parse_report(b'{"uid": "u", "attempt": 0, "activity": "Loading", "totalSteps": 8}')

    assert (report.step, report.metrics, report.checkpoint) == (0, {}, None)
