"""A job without a queue, where Kueue has a default queue or manages what has none: it waits, runs and comes back."""

from dataclasses import replace

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from tests.unit.operator.reconcile.queues import NO_RETRIES, NO_ROOM, PREEMPTED, DefaultQueue, NoQueue
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster


def test_kueues_default_queue_is_the_queue_of_a_job_without_one() -> None:
    world = DefaultQueue(startupDeadlineSeconds=60).says(waits_for=NO_ROOM).settle()

    assert (world.status["phase"], world.status["queueName"]) == (Phase.QUEUED, "default")
    assert world.condition(Condition.ADMITTED).message == f"the job waits in the queue default: {NO_ROOM}"
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    assert Reason.CLUSTER_SUSPENDED not in world.said
    assert world.wait(10_000).settle().status["phase"] == Phase.QUEUED, "no deadline runs in a queue"
    assert len(world.made) == 1


def test_the_deadlines_of_a_default_queue_start_at_the_admission() -> None:
    queue = DefaultQueue(startupDeadlineSeconds=60)
    queue.settle().wait(10_000)
    queue.lets_in().settle().wait(59)

    assert queue.settle().status["phase"] == Phase.STARTING
    assert queue.world.wait(1).settle().verdict(Condition.FAILED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)


def test_an_eviction_from_the_default_queue_is_a_graceful_stop_and_no_retry() -> None:
    queue = DefaultQueue().runs().evicts()

    assert queue.settle().status["stop"]["reason"] == Reason.PREEMPTED
    assert queue.world.status["phase"] == Phase.SUSPENDING
    world = queue.pods_are_gone().says(waits_for=NO_ROOM, eviction=PREEMPTED).settle()
    assert (world.status["phase"], world.status["attempt"]) == (Phase.QUEUED, 1)
    assert world.status["retries"] == NO_RETRIES
    world = queue.runs().world
    assert (world.status["phase"], world.status["submissionId"]) == (Phase.RUNNING, f"ppojob-{UID}-1")
    assert len(world.made) == 1, "it keeps its RayCluster, and with it its place"


def test_a_later_cluster_of_the_job_is_created_in_the_default_queue_that_it_had() -> None:
    queue = DefaultQueue().runs()
    queue.world.suspend().settle().trainer_stops_gracefully().settle()
    assert queue.world.verdict(Condition.ADMITTED) == ("False", Reason.SUSPENDED)
    queue.world.default_queue = None

    world = queue.world.suspend(False).settle()

    assert world.status["phase"] == Phase.QUEUED
    assert world.made[-1]["metadata"]["labels"][constants.LABEL_QUEUE] == "default"


def test_a_cluster_that_kueue_suspends_without_a_queue_waits_and_says_how_to_name_one() -> None:
    queue = NoQueue(startupDeadlineSeconds=60)
    assert queue.world.status["phase"] == Phase.QUEUED, "Kueue's Workload is not there yet"

    world = queue.says(waits_for="LocalQueue  doesn't exist").world.wait(10_000).settle()

    assert (world.status["phase"], world.status.get("queueName")) == (Phase.QUEUED, None)
    said = world.condition(Condition.ADMITTED).message
    assert f"kubectl label raycluster {first_cluster()} kueue.x-k8s.io/queue-name=QUEUE" in said
    assert said.endswith(": LocalQueue  doesn't exist")
    assert Reason.CLUSTER_SUSPENDED not in world.said


def test_the_queue_of_a_label_that_somebody_gives_the_cluster_is_that_of_the_job() -> None:
    queue = NoQueue().says(waits_for="LocalQueue  doesn't exist")
    queue.settle()
    [cluster] = queue.world.observed.clusters
    queue.world.see(clusters=(replace(cluster, queue="gpus"),))

    world = queue.runs().world

    assert (world.status["phase"], world.status["queueName"]) == (Phase.RUNNING, "gpus")
    assert world.verdict(Condition.ADMITTED) == ("True", Reason.ADMITTED)


def test_a_running_job_that_kueue_begins_to_manage_stops_gracefully_and_is_no_retry() -> None:
    world = World().run().wait(600).trainer_reports().settle()
    queue = NoQueue.__new__(NoQueue)
    queue.world = world
    queue.evicts()
    # Kueue creates the Workload when the pods are deleted.
    world.see(workloads=())

    assert queue.settle().status["stop"]["reason"] == Reason.PREEMPTED
    world = queue.says(waits_for="LocalQueue  doesn't exist").pods_are_gone().settle()
    assert (world.status["phase"], world.status["attempt"], world.status["retries"]) == (Phase.QUEUED, 1, NO_RETRIES)


def test_a_cluster_that_kueue_does_not_take_within_a_minute_was_suspended_by_somebody_else() -> None:
    world = NoQueue().world

    world.wait(60).settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.CLUSTER_SUSPENDED)
    assert world.verdict(Condition.ADMITTED) == ("Unknown", Reason.NOT_QUEUED)
    assert world.status["phase"] == Phase.STARTING


def test_a_suspended_cluster_without_kueue_was_suspended_by_somebody() -> None:
    world = World().settle()
    [cluster] = world.observed.clusters

    world.see(clusters=(replace(cluster, is_suspended=True),), workloads=None).settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.CLUSTER_SUSPENDED)
