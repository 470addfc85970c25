"""`kubectl ppo explain-pending`: the words of scheduler, kubelet and KubeRay, under the pool that they are about."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from typer.testing import Result

from ppojob_trainer.kubectl.pending import JobSnapshot, explain
from tests.unit.trainer.kubectl.conftest import FINISHED, MemoryCluster, job

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
NO_GPUS = "0/12 nodes are available: 12 Insufficient nvidia.com/gpu."


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


ACCEPTED = condition("Accepted", "True", "Valid", "good")
NOT_READY = condition("PoolsReady", "False", "InsufficientGPUs", f"pool critic requests 8; {NO_GPUS}")


def pod(name: str, pool: str | None, **status: Any) -> dict[str, Any]:
    labels = {} if pool is None else {"ppojob.dev/pool": pool}
    return {"metadata": {"name": name, "uid": f"uid-{name}", "labels": labels}, "status": status}


def ready(name: str, pool: str | None) -> dict[str, Any]:
    return pod(name, pool, conditions=[{"type": "Ready", "status": "True"}])


def unscheduled(name: str, pool: str) -> dict[str, Any]:
    return pod(name, pool, conditions=[{"type": "PodScheduled", "status": "False", "message": NO_GPUS}])


def event(about: str, reason: str, message: str, time: str, count: int = 1) -> dict[str, Any]:
    return {
        "metadata": {},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": count,
        "lastTimestamp": time,
        "involvedObject": {"uid": about},
    }


def said(**snapshot: Any) -> list[str]:
    defaults: dict[str, Any] = {"job": job(), "clusters": [], "pods": [], "events": [], "now": NOW}
    return explain(JobSnapshot(**{**defaults, **snapshot}))


def test_models_and_data_come_before_the_pods() -> None:
    fetching = condition("SourcesFetched", "False", "Fetching", "1.00 of 2.00 GB are in the storage")

    assert said(job=job(phase="Fetching", conditions=[ACCEPTED, fetching, NOT_READY]))[1:] == [
        "  Fetching: 1.00 of 2.00 GB are in the storage"
    ]


def test_a_pod_that_has_fetched_is_no_head() -> None:
    fetched = pod("products-fetch-x", None, phase="Succeeded")
    fetched["metadata"]["labels"]["ppojob.dev/task"] = "fetch"

    lines = said(job=job(phase="Starting", conditions=[ACCEPTED, NOT_READY]), pods=[fetched, ready("head", None)])

    assert "head: 1 of 1 pods ready, 1 created" in lines


def test_each_pool_says_what_it_waits_for() -> None:
    pools = [{"name": "actor", "desiredNodes": 1}, {"name": "critic", "desiredNodes": 2}]
    waiting = {"name": "ray-worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}}

    lines = said(
        job=job(phase="Starting", conditions=[ACCEPTED, NOT_READY], pools=pools),
        clusters=[{"metadata": {"name": "products-abc", "uid": "c"}, "status": {"state": "suspended"}}],
        pods=[
            ready("head", None),
            pod("a", "actor", containerStatuses=[waiting]),
            unscheduled("b", "critic"),
            unscheduled("c", "critic"),
        ],
        events=[event("uid-b", "FailedScheduling", NO_GPUS, "2026-01-31T12:25:00Z", count=4)],
    )

    assert lines == [
        "products: Starting, 30m old",
        f"  InsufficientGPUs: pool critic requests 8; {NO_GPUS}",
        "RayCluster products-abc: suspended",
        "head: 1 of 1 pods ready, 1 created",
        "pool actor: 0 of 1 pods ready, 1 created",
        "  kubelet: ray-worker: ImagePullBackOff: no such tag",
        "pool critic: 0 of 2 pods ready, 2 created",
        f"  scheduler: {NO_GPUS} (2 pods)",
        f"  Event, 4 x, last 5m ago: FailedScheduling: {NO_GPUS}",
    ]


def test_kuberays_words_stand_under_its_cluster() -> None:
    problem = condition("ReplicaFailure", "True", "FailedCreateWorkerPod", "exceeded quota")
    cluster = {
        "metadata": {"name": "products-abc", "uid": "c"},
        "spec": {"suspend": True},
        "status": {"state": "failed", "reason": "no pods", "conditions": [problem]},
    }

    lines = said(
        job=job(conditions=[ACCEPTED, NOT_READY]),
        clusters=[cluster],
        events=[
            event("c", "FailedToCreatePod", "exceeded  quota", "2026-01-31T12:29:00Z"),
            event("another", "Failed", "not about this job", "2026-01-31T12:29:30Z"),
        ],
    )

    assert lines[2:7] == [
        "RayCluster products-abc: failed",
        "  suspended (spec.suspend is true): a queue has not admitted it, or a user has suspended it",
        "  KubeRay: no pods",
        "  KubeRay: FailedCreateWorkerPod: exceeded quota",
        "  Event, 1 x, last 60s ago: FailedToCreatePod: exceeded quota",
    ]


def test_the_newest_three_warnings_are_said_and_equal_words_once() -> None:
    events = [event("uid-b", f"R{number}", "words", f"2026-01-31T12:2{number}:00Z") for number in range(5)]
    again = event("uid-b", "R4", "words", "2026-01-31T12:29:00Z", count=2)
    pools = [{"name": "critic", "desiredNodes": 1}]

    lines = said(
        job=job(conditions=[ACCEPTED, NOT_READY], pools=pools),
        pods=[unscheduled("b", "critic")],
        events=[*events, again],
    )

    assert lines[-3:] == [
        "  Event, 3 x, last 60s ago: R4: words",
        "  Event, 1 x, last 7m ago: R3: words",
        "  Event, 1 x, last 8m ago: R2: words",
    ]


def test_a_spec_that_was_not_accepted_is_the_whole_answer() -> None:
    refused = condition("Accepted", "False", "StorageMissing", "no claim data")

    assert said(job=job(conditions=[refused]))[1:] == ["  StorageMissing: no claim data"]


def test_a_job_in_a_queue_says_what_its_queue_says() -> None:
    queued = condition("Admitted", "False", "Queued", "the job waits in the queue gpus: no room")
    lines = said(job=job(phase="Queued", conditions=[ACCEPTED, queued, NOT_READY]))

    assert lines[1:] == ["  Queued: the job waits in the queue gpus: no room"]


def test_a_job_that_runs_without_its_queue_is_explained_as_any_other() -> None:
    unmanaged = condition("Admitted", "Unknown", "NotQueued", "it runs without a queue")

    assert said(job=job(conditions=[ACCEPTED, unmanaged, NOT_READY])) == said(job=job(conditions=[ACCEPTED, NOT_READY]))


def test_a_job_that_no_operator_has_seen_says_so() -> None:
    (_, words) = said(job={**job(), "status": {}})

    assert words.startswith(
        "  no operator reconciles the job: check that ppojob-operator runs and serves namespace team,"
    )


def test_a_job_that_has_ended_waits_for_nothing() -> None:
    assert said(job=job(conditions=[ACCEPTED, FINISHED]))[1:] == ["  the job has ended: see kubectl ppo status"]


def test_with_all_pods_ready_it_says_what_comes_after() -> None:
    there = condition("PoolsReady", "True", "PodsReady", "all")
    unsent = condition("Submitted", "False", "NotSubmitted", "Ray's dashboard does not accept the trainer")

    assert said(job=job(conditions=[ACCEPTED, there, unsent]))[1:] == [
        "  all pods are ready",
        "  Submitted False: NotSubmitted: Ray's dashboard does not accept the trainer",
    ]


def test_the_command_asks_for_the_jobs_own_objects(cluster: MemoryCluster, ppo: Callable[..., Result]) -> None:
    cluster.objects["ppojobs.ppojob.dev"] = [job(conditions=[ACCEPTED, NOT_READY])]

    result = ppo("explain-pending", "products")

    assert result.exit_code == 0, result.stderr
    assert "RayCluster: not created yet" in result.stdout
