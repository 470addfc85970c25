"""A job with a queue: it waits without a deadline, begins when it is let in, and comes back after an eviction."""

from typing import Any

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Plan, Ray, RayState
from tests.unit.operator.reconcile.queues import NO_RETRIES, NO_ROOM, PREEMPTED, Queue
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster


def test_a_job_waits_in_its_queue_and_says_what_for() -> None:
    world = Queue().says(waits_for=NO_ROOM).settle()

    assert world.status["phase"] == Phase.QUEUED
    assert world.verdict(Condition.ADMITTED) == ("False", Reason.QUEUED)
    assert world.condition(Condition.ADMITTED).message == f"the job waits in the queue gpus: {NO_ROOM}"
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    assert world.plan().requeue_after == 30
    assert "startTime" not in world.status


def test_kueue_is_asked_again_soon_until_it_has_said_what_for() -> None:
    assert Queue().world.plan().requeue_after == 3


def test_the_cluster_is_made_once_and_nothing_that_kueue_owns_is_written() -> None:
    queue = Queue(queuePriorityClass="high")

    [cluster] = queue.world.made

    assert "suspend" not in cluster["spec"]
    labels = cluster["metadata"]["labels"]
    assert (labels[constants.LABEL_QUEUE], labels[constants.LABEL_QUEUE_PRIORITY]) == ("gpus", "high")
    queue.runs().evicts().settle()
    queue.pods_are_gone().settle()
    queue.lets_in().settle()
    assert len(queue.world.made) == 1


def test_what_goes_missing_while_it_waits_takes_it_out_of_no_queue() -> None:
    world = Queue().says(waits_for=NO_ROOM).settle()

    world.see(claim=None, workloads=None).settle()

    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)
    assert world.verdict(Condition.ADMITTED) == ("False", Reason.QUEUED)


def test_no_deadline_runs_in_the_queue() -> None:
    queue = Queue(startupDeadlineSeconds=60, activeDeadlineSeconds=300)

    queue.world.wait(10_000)
    assert queue.settle().status["phase"] == Phase.QUEUED
    queue.lets_in().settle()
    queue.world.wait(59)

    assert queue.settle().status["phase"] == Phase.STARTING
    assert queue.world.wait(1).settle().verdict(Condition.FAILED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)


def test_it_begins_when_it_is_let_in() -> None:
    world = Queue().says(waits_for=NO_ROOM).runs().world

    assert world.status["phase"] == Phase.RUNNING
    assert world.verdict(Condition.ADMITTED) == ("True", Reason.ADMITTED)
    assert world.status["submissionId"] == f"ppojob-{UID}-0"
    assert world.said[:4] == [Reason.VALID, Reason.QUEUED, Reason.ADMITTED, Reason.PODS_READY]


def test_an_evicted_trainer_is_asked_to_stop_and_waited_for() -> None:
    queue = Queue().runs().evicts()

    world = queue.settle()

    assert world.status["phase"] == Phase.SUSPENDING
    assert world.verdict(Condition.ADMITTED) == ("False", Reason.PREEMPTED)
    assert world.condition(Condition.ADMITTED).message.endswith(PREEMPTED)
    assert world.status["stop"]["reason"] == Reason.PREEMPTED
    assert world.status["attempt"] == 0, "a later one would fence the trainer out before its checkpoint"
    world.wait(500).trainer_reports().settle()
    assert (world.status["phase"], world.status["attempt"]) == (Phase.SUSPENDING, 0)


def test_when_its_pods_are_gone_it_is_back_in_the_queue_with_another_attempt() -> None:
    queue = Queue().runs()
    queue.world.status["checkpoint"] = {"step": 7, "path": "/data/c", "time": "2026-03-01T12:00:00Z"}
    queue.evicts().settle()

    world = queue.pods_are_gone().says(waits_for=NO_ROOM, eviction=PREEMPTED).settle()

    assert world.status["phase"] == Phase.QUEUED
    assert world.condition(Condition.ADMITTED).message.endswith(
        f"{NO_ROOM}; it was admitted earlier and then evicted: {PREEMPTED}"
    )
    assert world.status["attempt"] == 1
    assert world.totals == NO_RETRIES
    assert "lastFailure" not in world.status
    assert [cluster.name for cluster in world.observed.clusters] == [first_cluster()], "it keeps its place"
    [told] = [words for words in world.words if "was pre-empted and its pods are deleted" in words]
    assert told.endswith("it resumes from its checkpoint of step 7")


def test_it_continues_when_it_is_admitted_again() -> None:
    queue = Queue(activeDeadlineSeconds=100).runs().evicts()
    queue.settle()
    queue.pods_are_gone().settle()
    queue.world.wait(10_000)

    world = queue.runs().world

    assert world.status["phase"] == Phase.RUNNING
    assert world.status["submissionId"] == f"ppojob-{UID}-1"
    assert world.totals == NO_RETRIES
    assert world.verdict(Condition.ADMITTED) == ("True", Reason.ADMITTED)


def test_a_job_that_is_admitted_before_its_loss_was_seen_continues_too() -> None:
    queue = Queue().runs().evicts()
    queue.settle()

    queue.pods_are_gone().lets_in()
    world = queue.world.pods_become(ready=True, suffix="-again").see(ray=Ray()).settle()

    assert (world.status["attempt"], world.totals) == (1, NO_RETRIES)
    assert world.status["submissionId"] == f"ppojob-{UID}-1"


def test_a_job_that_is_evicted_before_its_trainer_began_waits_again_in_the_same_attempt() -> None:
    queue = Queue().lets_in()
    queue.settle().pods_become(ready=False).settle()

    world = queue.evicts().pods_are_gone().settle()

    assert (world.status["phase"], world.status["attempt"]) == (Phase.QUEUED, 0)


def test_pods_that_outlive_the_grace_period_are_not_waited_for() -> None:
    queue = Queue(stopGracePeriodSeconds=100).runs().evicts()
    queue.settle()

    world = queue.world.wait(100).settle()

    assert (world.status["phase"], world.status["attempt"]) == (Phase.QUEUED, 1)
    assert Reason.GRACE_PERIOD_EXCEEDED in world.said
    assert world.totals == NO_RETRIES


def test_a_suspended_job_releases_its_quota_and_queues_again() -> None:
    queue = Queue().runs()

    world = queue.world.suspend().settle().trainer_stops_gracefully().settle()

    assert world.status["phase"] == Phase.SUSPENDED
    assert world.observed.clusters == ()
    assert world.verdict(Condition.ADMITTED) == ("False", Reason.SUSPENDED)
    world.suspend(False).settle()
    assert world.status["phase"] == Phase.QUEUED
    assert world.cluster_name != first_cluster()


def test_a_job_that_is_suspended_while_it_is_evicted_is_suspended() -> None:
    queue = Queue().runs().evicts()
    queue.settle().suspend().settle()

    world = queue.pods_are_gone().settle()

    assert (world.status["phase"], world.status["attempt"]) == (Phase.SUSPENDED, 1)
    assert world.observed.clusters == ()


def test_a_finished_job_is_in_no_queue() -> None:
    world = Queue().runs().world.ray_says(RayState.SUCCEEDED).settle()

    assert world.verdict(Condition.ADMITTED) == ("False", Reason.TRAINER_SUCCEEDED)
    assert world.observed.clusters == ()


def labelled(queue: str, **policy: str) -> World:
    world = World(runPolicy=policy)
    world.labels = {constants.LABEL_QUEUE: queue}
    return world


def test_kueues_label_of_the_job_is_its_queue() -> None:
    world = labelled("gpus", queuePriorityClass="high").see(workloads=()).settle()

    assert (world.status["phase"], world.status["queueName"]) == (Phase.QUEUED, "gpus")
    [cluster] = world.made
    assert cluster["metadata"]["labels"][constants.LABEL_QUEUE] == "gpus"


@pytest.mark.parametrize("labels", [{constants.LABEL_QUEUE: "others"}, {}], ids=["another", "none"])
def test_the_queue_of_an_accepted_job_stays_whatever_becomes_of_its_label(labels: dict[str, str]) -> None:
    world = labelled("gpus").see(workloads=()).settle()

    world.labels = labels

    assert world.settle().status["queueName"] == "gpus"
    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)


def test_a_label_that_names_another_queue_than_the_spec_is_refused_with_both() -> None:
    world = labelled("gpus", queueName="others").see(workloads=())

    world.look()

    assert world.verdict(Condition.ACCEPTED) == ("False", Reason.INVALID_SPEC)
    said = world.condition(Condition.ACCEPTED).message
    assert said.startswith("metadata.labels[kueue.x-k8s.io/queue-name]: 'gpus': spec.runPolicy.queueName is 'others'")


def test_without_kueue_a_job_with_a_queue_creates_nothing_and_continues_when_it_is_installed() -> None:
    world = World(runPolicy={"queueName": "gpus"}).see(workloads=None)

    plan: Plan = world.look()

    assert plan.apply == ()
    assert world.verdict(Condition.ACCEPTED) == ("Unknown", Reason.KUEUE_MISSING)
    assert "spec.runPolicy.queueName: 'gpus'" in world.condition(Condition.ACCEPTED).message
    assert world.see(workloads=()).settle().status["phase"] == Phase.QUEUED


def test_a_cluster_that_kueue_leaves_alone_runs_and_says_so() -> None:
    queue = Queue().lets_in()

    world = queue.world.see(workloads=()).settle()

    assert world.verdict(Condition.ADMITTED) == ("Unknown", Reason.NOT_QUEUED)
    assert world.status["phase"] == Phase.STARTING


@pytest.mark.parametrize("policy", [{}, {"suspend": True}])
def test_a_job_without_a_queue_says_nothing_of_queues(policy: dict[str, Any]) -> None:
    world = World(runPolicy=policy).settle()

    assert Condition.ADMITTED not in [condition["type"] for condition in world.status["conditions"]]
