"""A RayCluster that somebody deletes is made again, an Event says so, and it costs the job no retry that is counted."""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Ray
from tests.unit.operator.reconcile.queues import Queue
from tests.unit.operator.reconcile.worlds import World, first_cluster


def delete(world: World) -> World:
    """Delete all RayClusters by hand, and with them their pods."""
    return world.see(clusters=(), pods=(), ray=None)


def restart(world: World) -> World:
    """Bring the next attempt to a trainer that reports, after its pause."""
    world.wait(360).settle().pods_become(ready=True).see(ray=Ray()).settle()
    return world.wait(20).trainer_reports().settle()


def test_before_there_is_a_trainer_it_is_made_again_and_told_once() -> None:
    world = World().settle()

    delete(world).settle()

    assert [cluster.name for cluster in world.observed.clusters] == [first_cluster()]
    assert world.said.count(Reason.CLUSTER_RESTORED) == 1
    assert f"RayCluster {first_cluster()} was deleted by another client and is re-created" in world.words
    assert (world.status["attempt"], world.status["retries"]["total"]) == (0, 0)
    assert delete(world).settle().said.count(Reason.CLUSTER_RESTORED) == 2


def test_in_a_queue_too() -> None:
    world = delete(Queue().world).settle()

    assert world.said.count(Reason.CLUSTER_RESTORED) == 1
    assert world.status["phase"] == Phase.QUEUED


def test_while_a_retry_waits_it_is_told_when_it_is_made_again() -> None:
    world = World().run().trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()

    delete(world).settle().wait(9).settle()
    assert Reason.CLUSTER_RESTORED not in world.said
    world.wait(1).settle()

    assert world.said.count(Reason.CLUSTER_RESTORED) == 1


@pytest.mark.parametrize("error", ["", "exceeded quota"])
def test_a_cluster_that_never_was_is_not_told_of(error: str) -> None:
    world = World()
    world.look()

    plan = delete(world).see(last_error=error).plan()

    assert Reason.CLUSTER_RESTORED not in [event.reason for event in plan.events]


def test_under_a_trainer_it_ends_the_attempt_and_counts_against_no_limit() -> None:
    world = delete(World(runPolicy={"infrastructureBackoffLimit": 0, "backoffLimit": 0}).run()).settle()

    assert world.status["phase"] == Phase.RESTARTING
    assert world.status["retries"] == {"user": 0, "infrastructure": 0, "deleted": 1, "total": 1}
    assert world.status["lastFailure"]["reason"] == Reason.CLUSTER_DELETED
    [words] = [words for words in world.words if f"somebody deleted the RayCluster {first_cluster()}" in words]
    assert words.endswith("; the next one does not count against a limit")
    assert Reason.CLUSTER_DELETED in world.said

    assert restart(world).status["phase"] == Phase.RUNNING
    assert world.status["attempt"] == 1
    assert world.cluster_name != first_cluster()


def test_whoever_deletes_it_for_ever_meets_the_limit_in_the_end() -> None:
    world = World(runPolicy={"infrastructureBackoffLimit": 2}).run()

    for _ in range(7):
        restart(delete(world).settle())
    assert world.status["retries"] == {"user": 0, "infrastructure": 2, "deleted": 5, "total": 7}
    delete(world).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.BACKOFF_LIMIT_EXCEEDED)


def test_other_failures_leave_the_count_as_it_is() -> None:
    world = restart(delete(World().run()).settle())

    world.trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()

    assert world.status["retries"] == {"user": 1, "infrastructure": 0, "deleted": 1, "total": 2}
