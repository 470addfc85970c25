"""Models and data by address come into the storage before any RayCluster exists, and their failure is the job's."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FetchReport
from ppojob_operator.plan import FetchPod, Ray
from ppojob_operator.reading import read_fetch_job
from ppojob_operator.reading_pods import read_fetch_pod
from ppojob_operator.status_server.fields import fetch_status
from tests.unit.operator.reconcile.worlds import UID, World

MODEL = {"actor": {"path": "hf://Qwen/Qwen3-8B"}}
POD = "arithmetic-fetch-x"

RETRY = "correct the cause, then `kubectl ppo retry arithmetic` runs the job again"


def fetching(**changes: Any) -> World:
    """Return a job whose pod fetches a model."""
    world = World(model=MODEL, **changes).settle()
    return world.see(fetch_pods=(FetchPod(POD, world.now, has_started=True),)).settle()


def complete(world: World) -> World:
    assert world.observed.fetch_job is not None
    return world.see(fetch_job=replace(world.observed.fetch_job, is_complete=True))


def failed(world: World, words: str, kubernetes: str = "Job has reached the specified backoff limit") -> World:
    assert world.observed.fetch_job is not None
    pods = (FetchPod(POD, world.now, has_started=True, failure=words),)
    return world.see(fetch_job=replace(world.observed.fetch_job, failure=kubernetes), fetch_pods=pods)


def reports(world: World, number: int = 1, **fields: Any) -> World:
    """Let the status server write a report of the pod."""
    report = FetchReport.model_validate({"uid": UID, "number": number, **fields})
    world.status |= fetch_status(report, POD, world.raw, world.now) or {}
    return world


def test_the_job_comes_first_and_no_raycluster() -> None:
    world = World(model=MODEL).settle()

    assert [made["kind"] for made in world.made] == ["Job"]
    assert world.observed.config is not None, "the job file is mounted into its pod"
    assert world.observed.clusters == ()
    assert world.status["phase"] == Phase.FETCHING
    assert world.verdict(Condition.SOURCES_FETCHED) == ("False", Reason.FETCHING)
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    assert "when the models and data are in the storage" in world.condition(Condition.POOLS_READY).message
    assert Reason.FETCHING in world.said


def test_when_it_is_complete_the_raycluster_is_created_and_the_job_trains() -> None:
    world = complete(fetching()).settle()

    assert [made["kind"] for made in world.made] == ["Job", "RayCluster"]
    assert world.verdict(Condition.SOURCES_FETCHED) == ("True", Reason.FETCHED)
    assert world.status["phase"] == Phase.STARTING
    world.pods_become(ready=True).see(ray=Ray()).settle().wait(20).trainer_reports().settle()
    assert world.status["phase"] == Phase.RUNNING


def test_the_job_file_has_folders_in_place_of_addresses() -> None:
    world = World(model=MODEL, storage={"claimName": "data", "mountPath": "/data"}).settle()

    assert world.observed.config is not None
    text = world.observed.config["job.json"]
    assert '"path": "/data/sources/hf/models/Qwen/Qwen3-8B/main"' in text
    assert '"address": "hf://Qwen/Qwen3-8B"' in text


def test_a_job_that_was_deleted_after_its_end_is_not_created_again() -> None:
    world = complete(fetching()).settle().see(fetch_job=None, fetch_pods=())

    world.settle()

    assert [made["kind"] for made in world.made] == ["Job", "RayCluster"]


def test_a_job_that_was_deleted_before_its_end_is_created_again() -> None:
    world = fetching().see(fetch_job=None, fetch_pods=()).settle()

    assert [made["kind"] for made in world.made] == ["Job", "Job"]


def test_without_addresses_there_is_no_condition() -> None:
    world = World().run()

    assert [made["kind"] for made in world.made] == ["RayCluster"]
    assert Condition.SOURCES_FETCHED not in [each["type"] for each in world.status["conditions"]]


def test_the_condition_says_how_far_it_is() -> None:
    world = reports(fetching(), address="hf://Qwen/Qwen3-8B", bytes=4_200_000_000, totalBytes=16_400_000_000).settle()

    words = "4.20 of 16.40 GB are in the storage; fetches hf://Qwen/Qwen3-8B"
    assert world.condition(Condition.SOURCES_FETCHED).message == words
    assert world.plan().requeue_after == 10


def test_the_condition_says_for_whom_it_waits() -> None:
    world = reports(fetching(), message="waits for b/other (pod y), which fetches the same").settle()

    assert "waits for b/other (pod y)" in world.condition(Condition.SOURCES_FETCHED).message


def test_the_condition_says_why_the_pod_does_not_start() -> None:
    world = World(model=MODEL).settle().see(fetch_pods=(FetchPod(POD, trouble="0/3 nodes are available"),)).settle()

    assert world.condition(Condition.SOURCES_FETCHED).message == f"pod {POD} has not started: 0/3 nodes are available"


def test_a_try_that_failed_is_shown_and_ends_nothing() -> None:
    world = fetching()
    world.see(fetch_pods=(FetchPod(POD, world.now, has_started=True, failure="the hub is busy"),)).settle()

    assert world.verdict(Condition.SOURCES_FETCHED) == ("False", Reason.FETCHING)
    assert (
        world.condition(Condition.SOURCES_FETCHED).message == "a try has failed and will be repeated: the hub is busy"
    )


def test_what_is_refused_ends_the_job_with_the_pods_words() -> None:
    world = failed(fetching(), "there is no model Qwen/Qwen3-8B: correct the name").settle()

    assert world.status["phase"] == Phase.FAILED
    assert world.verdict(Condition.FAILED) == ("True", Reason.FETCH_FAILED)
    assert world.verdict(Condition.SOURCES_FETCHED) == ("False", Reason.FETCH_FAILED)
    words = "models or data could not be fetched: there is no model Qwen/Qwen3-8B: correct the name"
    assert world.condition(Condition.FAILED).message == f"{words}; {RETRY}"
    assert world.status["lastFailure"]["reason"] == Reason.FETCH_FAILED
    assert world.observed.clusters == ()


def test_without_the_pods_words_its_last_report_is_shown() -> None:
    world = failed(reports(fetching(), message="no space"), "").settle()

    assert world.condition(Condition.FAILED).message == f"models or data could not be fetched: no space; {RETRY}"


def test_without_both_kubernetes_words_are_shown() -> None:
    world = failed(fetching(), "").settle()

    assert "Job has reached the specified backoff limit" in world.condition(Condition.FAILED).message


def test_a_suspended_job_fetches_nothing_and_continues_when_it_is_resumed() -> None:
    world = fetching().suspend().settle()

    assert world.observed.fetch_job is None
    assert world.status["phase"] == Phase.SUSPENDED
    assert world.verdict(Condition.SOURCES_FETCHED) == ("False", Reason.SUSPENDED)

    world.suspend(False).settle()

    assert [made["kind"] for made in world.made] == ["Job", "Job"]
    assert world.status["phase"] == Phase.FETCHING


def test_a_job_that_is_created_suspended_fetches_nothing() -> None:
    assert World(model=MODEL, runPolicy={"suspend": True}).settle().made == []


def test_an_edited_environment_replaces_the_job() -> None:
    world = fetching().edit(env=[{"name": "HF_ENDPOINT", "value": "https://mirror"}]).settle()

    first, second = world.made
    assert first["spec"] != second["spec"]
    assert world.observed.fetch_job is not None
    assert world.status["phase"] == Phase.FETCHING


def test_in_a_queue_the_models_come_before_the_place_in_it() -> None:
    world = fetching(runPolicy={"queueName": "gpus"})
    assert world.status["phase"] == Phase.FETCHING

    complete(world).settle()

    assert world.status["phase"] == Phase.QUEUED


def test_the_startup_deadline_counts_for_a_pod_that_does_not_start() -> None:
    world = World(model=MODEL, runPolicy={"startupDeadlineSeconds": 600}).settle()
    world.see(fetch_pods=(FetchPod(POD, world.now, trouble="Insufficient cpu"),)).wait(601).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)
    assert "Insufficient cpu" in world.condition(Condition.FAILED).message


def test_the_startup_deadline_does_not_count_for_the_download() -> None:
    world = fetching(runPolicy={"startupDeadlineSeconds": 600}).wait(7200).settle()

    assert world.status["phase"] == Phase.FETCHING
    complete(world).look()
    world.see(clusters=tuple(replace(cluster, created=world.now) for cluster in world.observed.clusters))
    world.wait(300).settle()
    assert world.status["phase"] == Phase.STARTING


def test_the_active_deadline_ends_a_download_and_its_job() -> None:
    world = fetching(runPolicy={"activeDeadlineSeconds": 600}).wait(601).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.ACTIVE_DEADLINE_EXCEEDED)
    assert world.observed.fetch_job is None


@pytest.mark.parametrize(
    ("queue", "words"),
    [
        ("default", "waits in Kueue's queue default"),
        (None, "kubectl label job arithmetic-fetch kueue.x-k8s.io/queue-name=QUEUE"),
    ],
)
def test_a_job_that_kueue_suspends_waits_without_a_deadline(queue: str | None, words: str) -> None:
    world = World(model=MODEL, runPolicy={"startupDeadlineSeconds": 60}).settle()
    assert world.observed.fetch_job is not None
    world.see(fetch_job=replace(world.observed.fetch_job, is_suspended=True, queue=queue)).settle()

    world.wait(10_000).settle()

    assert world.status["phase"] == Phase.FETCHING
    assert words in world.condition(Condition.SOURCES_FETCHED).message


def test_a_job_that_cannot_be_created_is_named() -> None:
    world = World(model=MODEL).see(last_error="jobs.batch is forbidden: exceeded quota")

    world.look()

    assert "exceeded quota" in world.condition(Condition.SOURCES_FETCHED).message


@pytest.mark.parametrize(
    ("status", "is_complete", "failure"),
    [
        ({}, False, None),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, True, None),
        ({"conditions": [{"type": "Failed", "status": "True", "message": "no"}]}, False, "no"),
        ({"conditions": [{"type": "FailureTarget", "status": "True", "message": "no"}]}, False, None),
    ],
)
def test_a_job_as_the_api_server_has_it(status: dict[str, Any], is_complete: bool, failure: str | None) -> None:
    metadata = {"name": "x", "annotations": {"ppojob.dev/made-of": "d"}, "creationTimestamp": "2026-03-01T12:00:00Z"}
    labels = {"kueue.x-k8s.io/queue-name": "default"}

    job = read_fetch_job({"metadata": {**metadata, "labels": labels}, "spec": {"suspend": True}, "status": status})

    assert (job.is_complete, job.failure, job.created_from) == (is_complete, failure, "d")
    assert (job.is_suspended, job.queue) == (True, "default")


def test_a_pod_that_failed_has_its_termination_message() -> None:
    ended = {"exitCode": 3, "reason": "Error", "message": "there is no model x\n"}
    status = {"phase": "Failed", "containerStatuses": [{"name": "fetch", "state": {"terminated": ended}}]}

    pod = read_fetch_pod({"metadata": {"name": "p"}, "status": status})

    assert (pod.has_started, pod.failure) == (True, "there is no model x")


def test_a_pod_without_enough_memory_says_so() -> None:
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": "the log's end"}
    limits = {"resources": {"limits": {"memory": "4Gi"}}}
    raw = {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "fetch", **limits}]},
        "status": {"containerStatuses": [{"name": "fetch", "state": {"terminated": ended}}]},
    }

    assert "memory limit of 4Gi" in read_fetch_pod(raw).failure


def test_a_new_leader_gives_the_pod_its_time_again() -> None:
    world = World(model=MODEL, runPolicy={"startupDeadlineSeconds": 600}).settle().wait(700)
    world.see(leading_since=world.now - timedelta(seconds=10)).settle()

    assert world.status["phase"] == Phase.FETCHING
