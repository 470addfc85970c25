"""A suspended job saves a checkpoint, releases its pods, and continues as an attempt that is not a retry."""

from collections.abc import Callable

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Ray, RayState
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster, spec

NO_RETRIES = (0, 0, 0)


def time(seconds: int) -> str:
    """Return the moment so many seconds after the start, as the status writes it."""
    return World().wait(seconds).now.strftime("%Y-%m-%dT%H:%M:%SZ")


def suspended() -> World:
    """Return a job that ran for a minute and was suspended."""
    return World().run().wait(40).suspend().settle().trainer_stops_gracefully().settle()


def resume(world: World) -> World:
    """Let a job go on until its trainer reports."""
    return world.suspend(False).run()


def test_the_trainer_is_asked_and_keeps_its_pods_until_it_has_ended() -> None:
    world = World().run().suspend()

    plan = world.look()

    assert plan.requeue_after == 3
    assert world.status["phase"] == Phase.SUSPENDING
    assert world.status["stop"] == {"attempt": 0, "reason": Reason.SUSPENDING, "time": time(20)}
    assert world.verdict(Condition.SUSPENDED) == ("False", Reason.SUSPENDING)
    assert "by 12:10:20 UTC" in world.condition(Condition.SUSPENDED).message
    assert [cluster.name for cluster in world.wait(100).settle().observed.clusters] == [first_cluster()]
    assert world.status["attempt"] == 0


def test_the_pods_are_deleted_after_a_graceful_stop() -> None:
    world = suspended()

    assert world.observed.clusters == ()
    assert world.status["phase"] == Phase.SUSPENDED
    assert world.verdict(Condition.SUSPENDED) == ("True", Reason.SUSPENDED)
    for kind in (Condition.POOLS_READY, Condition.SUBMITTED, Condition.PROGRESSING):
        assert world.verdict(kind) == ("False", Reason.SUSPENDED)
    assert world.status["ready"] == "0/3"
    assert world.totals == NO_RETRIES
    assert "lastFailure" not in world.status
    assert "rayCluster" not in world.status
    assert "submissionId" not in world.status
    assert world.status["stop"]["completionTime"] == time(60)


def test_it_continues_as_the_next_attempt_which_is_no_retry() -> None:
    world = resume(suspended())

    assert world.status["phase"] == Phase.RUNNING
    assert world.status["attempt"] == 1
    assert world.status["submissionId"] == f"ppojob-{UID}-1"
    assert world.totals == NO_RETRIES
    assert world.cluster_name != first_cluster()
    assert world.verdict(Condition.SUSPENDED) == ("False", Reason.RESUMED)


def test_it_can_be_suspended_again_and_again() -> None:
    world = suspended()
    for attempt in (1, 2, 3):
        resume(world).suspend().settle()
        assert world.status["stop"]["attempt"] == attempt
        world.trainer_stops_gracefully().settle()
        assert world.status["phase"] == Phase.SUSPENDED

    assert world.status["attempt"] == 4
    assert world.totals == NO_RETRIES


def test_the_story_in_events() -> None:
    world = suspended()
    before = len(world.said)
    resume(world)

    assert world.said[3:before] == [Reason.SUSPENDING, Reason.TRAINER_STOPPED, Reason.SUSPENDED]
    assert world.said[before:] == [Reason.RESUMED, Reason.PODS_READY, Reason.TRAINER_SUBMITTED]


def test_nothing_is_done_or_written_while_it_is_suspended() -> None:
    world = suspended()

    plans = [world.wait(3600).look() for _ in range(5)]

    assert all(plan.status is None and not plan.apply and plan.requeue_after is None for plan in plans)


def test_a_trainer_that_does_not_end_in_its_grace_period_loses_its_pods() -> None:
    world = World(runPolicy={"stopGracePeriodSeconds": 100}).run().suspend().settle()

    world.wait(99).trainer_reports().settle()
    assert world.status["phase"] == Phase.SUSPENDING
    assert world.plan().requeue_after == 1
    world.wait(1).trainer_reports().settle()

    assert world.status["phase"] == Phase.SUSPENDED
    assert world.observed.clusters == ()
    assert world.status["attempt"] == 1, "what may still run is fenced out"
    assert Reason.GRACE_PERIOD_EXCEEDED in world.said
    assert any("it had not ended 100 s after it was asked" in words for words in world.words)


def test_a_job_that_is_created_suspended_makes_nothing() -> None:
    world = World(runPolicy={"suspend": True, "startupDeadlineSeconds": 60, "activeDeadlineSeconds": 60})

    plans = [world.wait(100).look() for _ in range(3)]

    assert [plan.apply for plan in plans] == [(), (), ()]
    assert world.status["phase"] == Phase.SUSPENDED
    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)
    assert "startTime" not in world.status
    assert "stop" not in world.status


def test_it_begins_with_its_first_attempt_when_it_is_set_free() -> None:
    world = World(runPolicy={"suspend": True, "startupDeadlineSeconds": 60}).wait(1000).settle()

    world.suspend(False).settle()

    assert world.status["startTime"] == time(1000)
    assert world.status["attempt"] == 0
    assert world.status["phase"] == Phase.STARTING
    assert [cluster.name for cluster in world.observed.clusters] == [first_cluster()]


def running() -> World:
    return World().run()


def pending() -> World:
    return World().settle()


def loading() -> World:
    world = World().settle().pods_become(ready=True).see(ray=Ray()).settle()
    assert "progress" not in world.status
    return world


def backing_off_on_warm_pods() -> World:
    return World().run().trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()


def backing_off_without_pods() -> World:
    return World().run().trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()


def succeeded() -> World:
    return World().run().ray_says(RayState.SUCCEEDED).settle()


def unaccepted() -> World:
    return World().see(claim=None).settle()


@pytest.mark.parametrize(
    ("state", "phase", "attempt"),
    [
        (running, Phase.SUSPENDING, 0),
        (loading, Phase.SUSPENDING, 0),
        (pending, Phase.SUSPENDED, 1),
        (backing_off_on_warm_pods, Phase.SUSPENDED, 1),
        (backing_off_without_pods, Phase.SUSPENDED, 1),
        (succeeded, Phase.SUCCEEDED, 0),
        (unaccepted, Phase.PENDING, 0),
    ],
)
def test_what_a_suspension_does_in_each_state(state: Callable[[], World], phase: str, attempt: int) -> None:
    world = state().suspend().settle()

    assert (world.status["phase"], world.status["attempt"]) == (phase, attempt)
    has_pods = bool(world.observed.clusters)
    assert has_pods == (phase == Phase.SUSPENDING)


@pytest.mark.parametrize("state", [running, loading, pending, backing_off_on_warm_pods, backing_off_without_pods])
def test_from_each_state_it_can_continue(state: Callable[[], World]) -> None:
    world = state().suspend().settle()
    if world.observed.clusters:
        world.trainer_stops_gracefully().settle()
    assert world.observed.clusters == ()

    world.wait(3600)
    resume(world)

    assert world.status["phase"] == Phase.RUNNING
    assert world.status["submissionId"] == f"ppojob-{UID}-{world.status['attempt']}"
    assert len({cluster["metadata"]["name"] for cluster in world.made}) == len(world.made), "each has its own name"


def test_a_suspension_does_not_shorten_the_pause_before_a_retry() -> None:
    world = backing_off_without_pods().suspend().settle()

    world.wait(2).suspend(False).settle()
    assert world.observed.clusters == ()
    assert world.verdict(Condition.SUBMITTED) == ("False", Reason.RESTARTING)

    world.wait(8).settle()
    assert len(world.observed.clusters) == 1


@pytest.mark.parametrize(
    ("ends", "phase", "retries", "reason"),
    [
        (World.trainer_stops_gracefully, Phase.SUSPENDED, 0, None),
        (lambda world: world.ray_says(RayState.STOPPED), Phase.SUSPENDED, 0, None),
        (lambda world: world.ray_says(RayState.SUCCEEDED), Phase.SUCCEEDED, 0, None),
        (
            lambda world: world.trainer_fails(Reason.REWARD_FAILED, FailureKind.USER),
            Phase.SUSPENDED,
            1,
            Reason.REWARD_FAILED,
        ),
        (lambda world: world.pod_is_gone("head"), Phase.SUSPENDED, 1, Reason.HEAD_LOST),
        (
            lambda world: world.trainer_fails(Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
            Phase.FAILED,
            0,
            Reason.CHECKPOINT_UNREADABLE,
        ),
    ],
    ids=["graceful stop", "stopped by hand", "all steps done", "program fails", "head lost", "permanent failure"],
)
def test_how_the_trainer_ends_while_it_is_to_stop(
    ends: Callable[[World], World], phase: str, retries: int, reason: str | None
) -> None:
    world = World().run().suspend().settle()

    ends(world).settle()

    assert world.status["phase"] == phase
    assert world.status["retries"]["total"] == retries
    assert world.status.get("lastFailure", {}).get("reason") == reason
    assert world.observed.clusters == ()


def test_a_stop_that_nobody_asked_for_is_a_failure() -> None:
    world = World().run()

    world.trainer_stops_gracefully().settle()

    assert world.status["lastFailure"]["reason"] == Reason.INTERRUPTED
    assert world.totals == (0, 1, 0)


def test_the_stop_of_an_earlier_attempt_excuses_nothing() -> None:
    world = resume(suspended())

    world.trainer_stops_gracefully().settle()

    assert world.status["lastFailure"]["attempt"] == 1
    assert world.status["retries"]["infrastructure"] == 1


def test_a_suspension_that_is_withdrawn_too_late_is_a_restart_on_the_same_pods() -> None:
    world = World().run().suspend().settle().suspend(False).settle()
    assert world.status["phase"] == Phase.SUSPENDING, "the trainer may have heard of it"

    world.trainer_stops_gracefully().settle()

    assert world.status["attempt"] == 1
    assert world.status["submissionId"] == f"ppojob-{UID}-1"
    assert [cluster.name for cluster in world.observed.clusters] == [first_cluster()]
    assert world.verdict(Condition.SUSPENDED) == ("False", Reason.RESUMED)
    assert world.totals == NO_RETRIES


def test_the_active_deadline_counts_while_the_trainer_is_waited_for() -> None:
    world = World(runPolicy={"activeDeadlineSeconds": 60}).run().suspend().settle()

    world.wait(40).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.ACTIVE_DEADLINE_EXCEEDED)
    assert world.verdict(Condition.SUSPENDED) == ("False", Reason.ACTIVE_DEADLINE_EXCEEDED)


def test_the_startup_deadline_restarts_too() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 60}).settle().wait(50).suspend().settle().wait(500)
    assert world.settle().status["phase"] == Phase.SUSPENDED

    world.suspend(False).settle().wait(59).settle()
    assert world.status["phase"] == Phase.RESTARTING
    world.wait(1).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)


def test_a_trainer_that_is_waited_for_still_gets_a_new_certificate_authority() -> None:
    world = World().run().suspend().settle()
    others = type(world.observed.surroundings)("https://operator/progress", "NEW PEM", b"k" * 32)

    plan = world.see(surroundings=others).look()

    assert [manifest["data"][constants.CA_FILE] for manifest in plan.apply] == ["NEW PEM"]


def test_live_settings_of_a_suspended_job_may_change() -> None:
    world = suspended()

    world.edit(**{**spec(), "runPolicy": {"suspend": True, "backoffLimit": 9}}).settle()

    assert world.status["phase"] == Phase.SUSPENDED
    assert world.condition(Condition.SUSPENDED).observed_generation == world.generation
