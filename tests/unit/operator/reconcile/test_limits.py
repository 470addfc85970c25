"""Everything that waits has a limit: the start, the whole run, a trainer that stands still, the finished object."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Ray, RayState, Trouble
from ppojob_operator.reconcile.situation import backoff
from tests.unit.operator.reconcile.worlds import World, spec

NO_GPUS = Trouble(Reason.INSUFFICIENT_GPUS, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")


def test_pools_that_never_come_fail_the_job_with_their_reason_and_words() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 60}).settle()
    world.pods_become(ready=False, pool="critic", trouble=NO_GPUS)

    world.wait(59).settle()
    assert world.status["phase"] == Phase.STARTING
    assert world.plan().requeue_after == 1

    world.wait(1).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)
    message = world.condition(Condition.FAILED).message
    assert "within 60 s (spec.runPolicy.startupDeadlineSeconds): InsufficientGPUs: pool critic requests 1" in message
    assert world.status["lastFailure"]["reason"] == Reason.STARTUP_DEADLINE_EXCEEDED
    assert world.observed.clusters == ()


def test_the_startup_deadline_is_over_once_the_trainer_was_sent() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 60}).run()

    world.wait(100).trainer_reports().settle()

    assert world.status["phase"] == Phase.RUNNING


def test_the_active_deadline_spans_all_attempts() -> None:
    world = World(runPolicy={"activeDeadlineSeconds": 300}).run()
    world.ray_says(RayState.STOPPED).settle()
    world.wait(10).settle()

    world.wait(269).trainer_reports().settle()
    assert world.status["phase"] == Phase.RUNNING
    world.wait(1).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.ACTIVE_DEADLINE_EXCEEDED)
    assert "300 s (spec.runPolicy.activeDeadlineSeconds)" in world.condition(Condition.FAILED).message


def test_a_job_that_ended_well_at_its_deadline_has_ended_well() -> None:
    world = World(runPolicy={"activeDeadlineSeconds": 300}).run()

    world.wait(300).ray_says(RayState.SUCCEEDED).settle()

    assert world.status["phase"] == Phase.SUCCEEDED


def test_a_job_that_waits_for_its_claim_has_no_deadline() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 60}).see(claim=None)

    world.wait(9999).settle()

    assert world.status["phase"] == Phase.PENDING


def repeat(world: World, seconds: int) -> World:
    """Let a trainer say the same every ten seconds, for so long."""
    for _ in range(0, seconds, 10):
        world.wait(10).trainer_repeats().settle()
    return world


def test_a_trainer_that_reports_the_same_for_too_long_is_stalled_and_gets_a_new_attempt_on_new_pods() -> None:
    world = repeat(World(runPolicy={"stallTimeoutSeconds": 100}).run(), 100)
    assert world.status["attempt"] == 0

    repeat(world, 10)

    assert world.verdict(Condition.STALLED) == ("True", Reason.NO_PROGRESS)
    assert world.status["lastFailure"]["reason"] == Reason.NO_PROGRESS
    assert "for 100 s (spec.runPolicy.stallTimeoutSeconds)" in world.status["lastFailure"]["message"]
    assert "since step 1, Training" in world.status["lastFailure"]["message"]
    assert world.status["retries"]["user"] == 1
    assert world.observed.clusters == ()


@pytest.mark.parametrize(
    "gets_on",
    [
        lambda world: world.trainer_reports("Training", 2),
        lambda world: world.trainer_reports("Saving", 1),
        lambda world: world.trainer_repeats(checkpoint={"step": 1, "path": "/c", "time": "2026-03-01T12:00:00Z"}),
    ],
    ids=["a step", "another activity", "a checkpoint"],
)
def test_whatever_changes_in_the_reports_is_progress(gets_on: Callable[[World], World]) -> None:
    world = repeat(World(runPolicy={"stallTimeoutSeconds": 100}).run(), 90)

    gets_on(world.wait(10)).settle()
    repeat(world, 100)
    assert world.status["attempt"] == 0
    repeat(world, 10)

    assert world.status["attempt"] == 1


@pytest.mark.parametrize("has_reported", [True, False])
def test_a_trainer_whose_reports_do_not_arrive_is_not_stalled(has_reported: bool) -> None:
    world = World(runPolicy={"stallTimeoutSeconds": 100}).run()
    if not has_reported:
        del world.status["progress"]

    world.wait(10_000).settle()
    assert world.verdict(Condition.STALLED) == ("False", Reason.TRAINING)
    world.trainer_reports().settle()

    assert world.status["attempt"] == 0
    assert world.status["phase"] == Phase.RUNNING


def test_a_step_that_was_the_same_before_and_after_a_silence_has_stood_still() -> None:
    world = World(runPolicy={"stallTimeoutSeconds": 100}).run()

    world.wait(101).trainer_repeats().settle()

    assert world.status["lastFailure"]["reason"] == Reason.NO_PROGRESS


def test_reports_of_an_older_operator_which_do_not_say_since_when_stall_nothing() -> None:
    world = World(runPolicy={"stallTimeoutSeconds": 100}).run()
    del world.status["progress"]["lastChangeTime"]

    assert repeat(world, 110).status["attempt"] == 0
    assert repeat(world, 10).status["attempt"] == 1


def test_a_stalled_trainer_may_be_left_alone_and_then_continues() -> None:
    world = World(runPolicy={"stallTimeoutSeconds": 100, "restartOnStall": False}).run()

    repeat(world, 210)
    assert world.verdict(Condition.STALLED) == ("True", Reason.NO_PROGRESS)
    assert "spec.runPolicy.restartOnStall is false" in world.condition(Condition.STALLED).message
    assert world.said.count(Reason.NO_PROGRESS) == 1
    assert world.status["attempt"] == 0
    assert world.status["phase"] == Phase.RUNNING

    world.trainer_reports().settle()
    assert world.verdict(Condition.STALLED) == ("False", Reason.TRAINING)


def test_a_stall_that_was_left_alone_can_be_ended_by_an_edit() -> None:
    world = repeat(World(runPolicy={"stallTimeoutSeconds": 100, "restartOnStall": False}).run(), 110)

    world.edit(runPolicy={"stallTimeoutSeconds": 100}).settle()

    assert world.status["attempt"] == 1
    assert world.status["lastFailure"]["reason"] == Reason.NO_PROGRESS


def test_the_next_attempt_is_not_stalled_by_what_the_last_one_reported() -> None:
    world = repeat(World(runPolicy={"stallTimeoutSeconds": 100}).run(), 110)
    assert world.verdict(Condition.STALLED)[0] == "True", "until the new attempt is sent"

    world.wait(10).settle().pods_become(ready=True).see(ray=Ray()).settle()
    assert world.verdict(Condition.STALLED) == ("False", Reason.TRAINING)
    repeat(world, 10)

    assert world.status["attempt"] == 1
    assert world.verdict(Condition.STALLED) == ("False", Reason.TRAINING)


def test_a_finished_job_is_deleted_when_its_time_is_over() -> None:
    world = World(runPolicy={"ttlSecondsAfterFinished": 100}).run().ray_says(RayState.SUCCEEDED).settle()

    assert world.wait(99).look().requeue_after == 1
    assert not world.is_deleted
    world.wait(1).look()

    assert world.is_deleted


def failed_with(policy: object) -> World:
    """Return a job whose stored spec is invalid, so that it has failed: an older operator accepted it."""
    world = World().settle()
    world.spec = {**world.spec, "placement": {"actor": "nowhere"}, "runPolicy": policy}
    world.status.pop("effectiveLayout")
    world.settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.INVALID_SPEC)
    return world


def test_a_failed_job_whose_stored_spec_is_invalid_is_deleted_too() -> None:
    world = failed_with({"ttlSecondsAfterFinished": 100})

    assert world.wait(99).look().requeue_after == 1
    assert not world.is_deleted
    world.wait(1).look()

    assert world.is_deleted


@pytest.mark.parametrize("given", [None, "0", -1, True, 1.5, 2**63, [0]])
def test_a_time_that_is_invalid_itself_deletes_nothing(given: object) -> None:
    world = failed_with({"ttlSecondsAfterFinished": given})

    plan = world.wait(10_000_000).look()

    assert plan.requeue_after is None
    assert not world.is_deleted


@pytest.mark.parametrize("policy", [None, [], "never", {}])
def test_a_run_policy_that_is_none_deletes_nothing(policy: object) -> None:
    assert not failed_with(policy).wait(10_000_000).settle().is_deleted


def test_without_a_time_a_finished_job_stays() -> None:
    world = World().run().ray_says(RayState.SUCCEEDED).settle()

    plan = world.wait(10_000_000).look()

    assert plan.requeue_after is None
    assert not world.is_deleted


def test_a_finished_job_whose_end_nobody_knows_is_never_deleted() -> None:
    world = World(runPolicy={"ttlSecondsAfterFinished": 0}).run().ray_says(RayState.SUCCEEDED)
    world.look()
    del world.status["completionTime"]

    world.wait(10).look()

    assert not world.is_deleted


def test_a_ttl_that_is_given_after_the_end_counts() -> None:
    world = World().run().ray_says(RayState.SUCCEEDED).settle()
    world.spec = spec(runPolicy={"ttlSecondsAfterFinished": 0})

    world.look()

    assert world.is_deleted


@pytest.mark.parametrize(("failures", "seconds"), [(1, 10), (2, 20), (6, 320), (7, 360), (10_000, 360)])
def test_the_pause_doubles_up_to_six_minutes(failures: int, seconds: int) -> None:
    assert backoff(failures) == timedelta(seconds=seconds)
