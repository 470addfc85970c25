"""A head is lost when it, its RayCluster or Ray is gone, or nobody answers; not because a clock is wrong."""

from datetime import timedelta

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Cluster, Ray, RayState
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster


@pytest.mark.parametrize(
    ("clusters", "reason", "words"),
    [
        ((), Reason.CLUSTER_DELETED, "somebody deleted"),
        ((Cluster(first_cluster(), is_deleting=True),), Reason.CLUSTER_DELETED, "somebody deleted"),
        ((Cluster(first_cluster(), is_suspended=True),), Reason.HEAD_LOST, "was suspended"),
    ],
)
def test_a_lost_cluster_ends_the_attempt(clusters: tuple[Cluster, ...], reason: str, words: str) -> None:
    world = World().run().see(clusters=clusters, workloads=None)

    world.look()

    assert world.status["lastFailure"]["reason"] == reason
    assert words in world.status["lastFailure"]["message"]
    assert world.status["attempt"] == 1


def test_a_lost_head_ends_the_attempt_at_once() -> None:
    world = World().run().pod_is_gone("head")

    world.settle()

    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST
    assert world.observed.clusters == ()


def test_a_head_that_was_replaced_does_not_know_the_trainer_any_more() -> None:
    world = World().run().see(ray=Ray())

    world.wait(5).settle()
    assert world.status["attempt"] == 0, "Ray may need a moment"

    world.wait(30).trainer_reports().settle()
    assert world.status["attempt"] == 1
    assert "does not know the submission" in world.status["lastFailure"]["message"]


def test_a_silent_dashboard_does_no_harm_while_the_trainer_reports() -> None:
    world = World().run().see(ray=Ray(problem="no answer"))

    for _ in range(60):
        world.wait(10).trainer_reports().settle()

    assert world.status["attempt"] == 0


@pytest.mark.parametrize("minutes", [-3, 3])
def test_clocks_of_replicas_that_differ_do_no_harm_while_the_trainer_reports(minutes: int) -> None:
    world = World()
    world.skew = timedelta(minutes=minutes)
    world.run().see(ray=Ray(problem="no answer"))

    for _ in range(30):
        world.wait(10).trainer_reports().settle()
    assert world.status["attempt"] == 0

    world.wait(119).settle()
    assert world.status["attempt"] == 0
    world.wait(2).settle()
    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST, "by one clock, whatever the other says"


def test_a_head_from_which_nobody_answers_is_lost() -> None:
    world = World().run().see(ray=Ray(problem="no answer within 20 s"))

    for _ in range(12):
        world.wait(10).settle()
        assert world.status["attempt"] == 0
    world.wait(10).settle()

    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST
    assert "no answer within 20 s" in world.status["lastFailure"]["message"]


def test_an_attempt_that_was_never_sent_cannot_be_lost() -> None:
    world = World().settle().pods_become(ready=True)

    world.pod_is_gone("head").wait(500).settle()

    assert "lastFailure" not in world.status


def test_a_trainer_that_ray_lost_is_the_clusters_fault() -> None:
    world = World().run()

    world.ray_says(RayState.FAILED, error_type="JOB_SUPERVISOR_ACTOR_DIED", message="The actor died\nmore").settle()

    assert world.status["lastFailure"]["message"].startswith("Ray lost the trainer: The actor died; ")
    assert world.status["retries"]["infrastructure"] == 1


@pytest.mark.parametrize("loss", ["head", "cluster", "Ray"])
def test_a_trainer_that_has_reported_its_end_has_succeeded_whatever_is_lost_then(loss: str) -> None:
    world = World().run().trainer_reports("Finished", 8).settle()
    assert world.status["phase"] == Phase.RUNNING, "Ray has the last word while it answers"

    if loss == "head":
        world.pod_is_gone("head")
    elif loss == "cluster":
        world.see(clusters=())
    else:
        world.ray_says(RayState.FAILED, message="the driver's node was lost")
    world.settle()

    assert (world.status["phase"], world.status["attempt"]) == (Phase.SUCCEEDED, 0)
    assert "lastFailure" not in world.status
    assert "reported that it has finished" in world.condition(Condition.COMPLETE).message


def test_the_end_that_an_earlier_attempt_has_reported_is_not_that_of_the_next() -> None:
    world = World().run().pod_is_gone("head").settle()
    world.status["progress"] |= {"activity": "Finished"}
    world.wait(600).settle().pods_become(ready=True).see(ray=Ray()).settle()
    assert (world.status["submissionId"], world.status["progress"]["attempt"]) == (f"ppojob-{UID}-1", 0)

    world.pod_is_gone("head").settle()

    assert (world.status["phase"], world.status["attempt"]) == (Phase.RESTARTING, 2)
