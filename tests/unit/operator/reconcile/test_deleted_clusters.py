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


def test_before_there_is_a_trainer_it_is_re_created_and_reported_once() -> None:
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


def test_while_a_retry_waits_it_is_reported_when_it_is_re_created() -> None:
    world = World().run().trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()

    delete(world).settle().wait(9).settle()
    assert Reason.CLUSTER_RESTORED not in world.said
    world.wait(1).settle()

    assert world.said.count(Reason.CLUSTER_RESTORED) == 1


@pytest.mark.parametrize("error", ["", "exceeded quota"])
def test_a_cluster_that_never_existed_is_not_reported(error: str) -> None:
    world = World()
    world.look()

    plan = delete(world).see(last_error=error).plan()

    assert Reason.CLUSTER_RESTORED not in [event.reason for event in plan.events]


def test_under_a_trainer_it_ends_the_attempt_and_counts_against_no_limit() -> None:
    world = delete(World(runPolicy={"backoffLimit": 0}).run()).settle()

    assert world.status["phase"] == Phase.RESTARTING
    assert world.totals == (0, 0, 1)
    assert world.status["lastFailure"]["reason"] == Reason.CLUSTER_DELETED
    [words] = [words for words in world.words if f"somebody deleted the RayCluster {first_cluster()}" in words]
    assert words.endswith("; it is not counted")
    assert Reason.CLUSTER_DELETED in world.said

    assert restart(world).status["phase"] == Phase.RUNNING
    assert world.status["attempt"] == 1
    assert world.cluster_name != first_cluster()


def test_repeated_deletions_get_longer_and_longer_pauses() -> None:
    world = World(runPolicy={"backoffLimit": 0}).run()

    for _ in range(12):
        restart(delete(world).settle())
    delete(world).settle()

    assert world.status["phase"] == Phase.RESTARTING
    assert world.totals == (0, 0, 13)
    assert world.wait(359).look().submission is None
    assert world.condition(Condition.SUBMITTED).reason == Reason.RESTARTING


def test_other_failures_leave_the_count_as_it_is() -> None:
    world = restart(delete(World().run()).settle())

    world.trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()

    assert world.totals == (1, 0, 1)
