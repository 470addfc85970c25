"""Reports of the pod that fetches models and data: who may send them, and what they become in the status."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import (
    FETCH_PATH,
    REPORT_PATH,
    FetchReport,
    ProgressReport,
    fetch_url,
    progress_audience,
)
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_operator.status_server import JobIdentity, OperatorMetrics, TokenIdentity
from ppojob_operator.status_server.authentication import Authenticator, TokenReviews
from ppojob_operator.status_server.fields import fetch_status, progress_status
from ppojob_operator.status_server.intake import Intake
from ppojob_operator.status_server.refusals import Refusal
from ppojob_operator.status_server.writer import ProgressWriter
from tests.unit.operator.status_server.conftest import POD_CLAIM, TOKEN, make_token
from tests.unit.operator.status_server.conftest import SOURCE as ADDRESS

ARRIVAL = datetime(2026, 1, 31, 12, 5, tzinfo=UTC)
POD = "arithmetic-fetch-x"
FETCH_TOKEN = make_token(kubernetes={**POD_CLAIM, "pod": {"name": POD, "uid": "pod-2"}})
SOURCE = {"address": "s3://b/data.parquet", "path": "/data/sources/s3/b/x/data.parquet", "bytes": 5}
REPORT = {
    "uid": "uid-1",
    "number": 3,
    "address": "hf://a/b",
    "bytes": 10,
    "totalBytes": 40,
    "sources": [SOURCE],
}

Send = Callable[..., Awaitable[Any]]


@pytest.fixture
def fetch_pod(cluster: Any, identity: TokenIdentity, key: JobIdentity) -> dict[str, Any]:
    """The pod of the Job, with its token."""
    metadata = {
        "name": POD,
        "uid": "pod-2",
        "labels": {constants.LABEL_JOB: key.name, constants.LABEL_TASK: constants.TASK_FETCH},
        "ownerReferences": [{"kind": "Job", "name": "arithmetic-fetch", "uid": "job-1", "controller": True}],
    }
    pod = {"metadata": metadata, "status": {"phase": "Running"}}
    cluster.pods[key.namespace, POD] = pod
    cluster.tokens[FETCH_TOKEN, progress_audience(*key)] = replace(identity, pod_name=POD, pod_uid="pod-2")
    return pod


@pytest.fixture
def writer(cluster: Any) -> ProgressWriter:
    return ProgressWriter(cluster, OperatorMetrics(), interval_seconds=10)


@pytest.fixture
def intake(cluster: Any, writer: ProgressWriter) -> Intake:
    reviews = TokenReviews(cluster, cache_seconds=60)
    names = (lambda job: f"{job}-trainer", lambda job: f"{job}-fetch")
    authenticator = Authenticator(cluster, reviews, *names)
    return Intake(cluster, authenticator, writer, write_limit_seconds=0.2, version="0.3.0", clock=lambda: ARRIVAL)


@pytest.fixture
def send(intake: Intake, fetch_pod: dict[str, Any]) -> Send:
    async def send(*, token: str = FETCH_TOKEN, **changes: Any) -> Any:
        body = json.dumps({**REPORT, **changes}).encode()
        caller = await intake.identify(f"Bearer {token}", "rl-team", "arithmetic", ADDRESS)
        return await intake.receive_fetch(caller, body)

    return send


async def test_a_report_is_kept_for_the_status(send: Send, writer: ProgressWriter, cluster: Any) -> None:
    await send()
    await writer.flush(5)

    [(_, status)] = cluster.writes
    assert status["fetch"] == {
        "address": "hf://a/b",
        "bytes": 10,
        "totalBytes": 40,
        "pod": POD,
        "report": 3,
        "lastUpdateTime": "2026-01-31T12:05:00Z",
    }
    assert status["sources"] == [SOURCE]
    PPOJobStatus.model_validate(status)


@pytest.mark.parametrize(
    ("owners", "words"),
    [
        ([], "is of Job none"),
        ([{"kind": "Job", "name": "own", "uid": "x"}], "is of Job own: .* come from arithmetic-fetch"),
        ([{"kind": "RayCluster", "name": "arithmetic-fetch", "uid": "x"}], "is of Job none"),
    ],
)
async def test_other_pods_are_refused(
    send: Send, fetch_pod: dict[str, Any], owners: list[dict[str, str]], words: str
) -> None:
    fetch_pod["metadata"]["ownerReferences"] = owners

    with pytest.raises(Refusal, match=words) as refused:
        await send()

    assert refused.value.status == 403


async def test_the_trainers_pod_reports_no_fetch_and_the_fetch_no_progress(
    send: Send, intake: Intake, report: dict[str, Any]
) -> None:
    with pytest.raises(Refusal, match="is of Job none"):
        await send(token=TOKEN)
    caller = await intake.identify(f"Bearer {FETCH_TOKEN}", "rl-team", "arithmetic", ADDRESS)
    with pytest.raises(Refusal, match="reports of rl-team/arithmetic come from"):
        await intake.receive(caller, json.dumps(report).encode())


async def test_another_account_is_refused(send: Send, cluster: Any, identity: TokenIdentity, key: JobIdentity) -> None:
    other = replace(identity, pod_name=POD, pod_uid="pod-2", username="system:serviceaccount:rl-team:default")
    cluster.tokens[FETCH_TOKEN, progress_audience(*key)] = other

    with pytest.raises(Refusal, match="the token belongs to system:serviceaccount:rl-team:default"):
        await send()


async def test_a_job_that_has_ended_takes_none(send: Send, job: dict[str, Any]) -> None:
    job["status"]["conditions"] = [{"type": "Failed", "status": "True"}]

    with pytest.raises(Refusal) as refused:
        await send()

    assert refused.value.status == 410


async def test_what_is_no_report_is_refused(send: Send) -> None:
    with pytest.raises(Refusal, match="bytes: Input should be greater than or equal to 0"):
        await send(bytes=-1)


def written(job: dict[str, Any], pod: str = POD, **changes: Any) -> dict[str, Any] | None:
    return fetch_status(FetchReport.model_validate({**REPORT, **changes}), pod, job, ARRIVAL)


def test_an_older_report_of_the_same_pod_is_not_written(job: dict[str, Any]) -> None:
    job["status"] |= written(job) or {}

    assert written(job, number=3) is None
    assert written(job, number=2) is None
    assert (written(job, number=4) or {})["fetch"]["report"] == 4


def test_the_next_pod_counts_from_one(job: dict[str, Any]) -> None:
    job["status"] |= written(job) or {}

    assert (written(job, pod="arithmetic-fetch-y", number=1) or {})["fetch"]["pod"] == "arithmetic-fetch-y"


def test_what_the_trainer_has_reported_stays(job: dict[str, Any], report: dict[str, Any]) -> None:
    before = progress_status(ProgressReport.model_validate(report), job, ARRIVAL) or {}
    job["status"] |= before

    after = written(job) or {}

    assert {name: value for name, value in after.items() if name not in ("fetch", "sources")} == before


def test_the_trainers_first_report_keeps_the_sources_and_ends_the_fetch(
    job: dict[str, Any], report: dict[str, Any]
) -> None:
    job["status"] |= written(job) or {}

    after = progress_status(ProgressReport.model_validate(report), job, ARRIVAL) or {}

    assert after["sources"] == [SOURCE]
    assert "fetch" not in after


def test_both_addresses_are_beside_each_other() -> None:
    names = {"namespace": "a", "name": "b"}

    assert (
        fetch_url(f"https://operator{REPORT_PATH.format(**names)}") == f"https://operator{FETCH_PATH.format(**names)}"
    )
