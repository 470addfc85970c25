"""A trainer without reports may still train: Progressing is Unknown and says since when, and nothing else happens."""

from datetime import timedelta

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Ray, RayState
from tests.unit.operator.reconcile.worlds import World

UNKNOWN, TRAINS = ("Unknown", Reason.REPORTS_MISSING), ("True", Reason.TRAINING)
DAY = 86_400


def silent() -> World:
    """Return a job whose trainer reported at 12:00:20 and has not reported for 70 s since."""
    return World().run().wait(70).settle()


def progressing(world: World) -> tuple[str, str]:
    return world.verdict(Condition.PROGRESSING)


def test_it_is_said_since_when_no_report_arrives_and_what_to_look_at() -> None:
    world = World().run()
    assert progressing(world.wait(60).settle()) == TRAINS

    assert progressing(world.wait(10).settle()) == UNKNOWN

    message = world.condition(Condition.PROGRESSING).message
    assert "since 2026-03-01 12:00:20 UTC" in message
    assert "Can its head pod reach operator?" in message
    assert world.said[-1] == Reason.REPORTS_MISSING


def test_silence_alone_ends_no_attempt_and_writes_nothing_more() -> None:
    world = silent()

    plans = [world.wait(10).look() for _ in range(1000)]

    assert all(plan.status is None and not plan.events for plan in plans)
    assert (world.status["attempt"], world.status["phase"]) == (0, Phase.RUNNING)
    assert world.said.count(Reason.REPORTS_MISSING) == 1


def test_the_next_report_catches_up() -> None:
    world = silent().wait(DAY)

    world.trainer_reports(step=7).settle()

    assert progressing(world) == TRAINS
    assert world.status["progress"]["step"] == 7
    assert world.status["attempt"] == 0


def test_a_trainer_that_never_reports_has_more_time_for_its_first_one() -> None:
    world = World().settle().pods_become(ready=True).see(ray=Ray()).settle()

    assert progressing(world.wait(180).settle()) == ("False", Reason.STARTING)
    assert progressing(world.wait(10).settle()) == UNKNOWN
    assert "since 2026-03-01 12:00:00 UTC" in world.condition(Condition.PROGRESSING).message
    world.wait(DAY).settle()

    assert world.status["attempt"] == 0


def test_a_trainer_that_ray_has_not_begun_is_not_silent() -> None:
    world = World().settle().pods_become(ready=True).see(ray=Ray()).settle().ray_says(RayState.PENDING)

    assert progressing(world.wait(DAY).settle()) == ("False", Reason.STARTING)


def test_who_takes_the_lead_listens_before_it_says_that_nobody_reports() -> None:
    world = World().run().wait(DAY)
    world.see(leading_since=world.now)

    assert progressing(world.settle()) == TRAINS
    assert progressing(world.wait(60).settle()) == TRAINS
    assert progressing(world.wait(10).settle()) == UNKNOWN
    assert "since 2026-03-01 12:00:20 UTC" in world.condition(Condition.PROGRESSING).message


def test_what_was_missing_stays_so_for_a_new_leader_until_a_report_is_there() -> None:
    world = silent()
    world.see(leading_since=world.now)

    assert all(world.wait(10).look().status is None for _ in range(10))
    world.trainer_reports().settle()

    assert progressing(world) == TRAINS


def test_a_dashboard_that_fails_once_while_nobody_reports_is_no_lost_head() -> None:
    world = silent().wait(DAY).settle()
    ray = world.observed.ray

    world.see(ray=Ray(problem="no answer")).settle().wait(30).settle()
    assert world.verdict(Condition.PROGRESSING) == ("Unknown", Reason.DASHBOARD_UNREACHABLE)
    world.see(ray=ray).wait(10).settle()

    assert progressing(world) == UNKNOWN
    assert "unreachableSince" not in world.status["rayCluster"]
    assert world.status["attempt"] == 0


def test_a_head_from_which_neither_answers_is_lost_after_half_a_minute() -> None:
    world = silent().wait(DAY).settle()

    world.see(ray=Ray(problem="no answer")).settle().wait(31).settle()

    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST


@pytest.mark.parametrize("seconds", [0, 1900, DAY])
def test_an_operator_that_comes_back_finds_a_trainer_that_ran_on(seconds: int) -> None:
    world = World().run().wait(seconds)
    world.see(leading_since=world.now - timedelta(seconds=1)).settle()
    assert progressing(world) == TRAINS

    for step in range(2, 20):
        world.wait(10).trainer_reports(step=step).settle()
        assert progressing(world) == TRAINS

    assert world.status["retries"]["total"] == 0
