"""A layout that is edited again while the trainer stops is tried too: a refused one leaves the job what it has."""

from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from tests.unit.operator.reconcile.worlds import World, first_cluster

ACTOR, CRITIC = {"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}
TWO_CRITICS: dict[str, Any] = {"pools": [ACTOR, {**CRITIC, "nodes": 2}]}
HIGH_PRIORITY: dict[str, Any] = {"pools": [ACTOR, {**CRITIC, "podTemplate": {"spec": {"priorityClassName": "high"}}}]}
ILLEGAL: dict[str, Any] = {"pools": [{**ACTOR, "podTemplate": {"spec": {"restartPolicy": "Always"}}}, CRITIC]}
NO_CLASS = "spec.pools[1].podTemplate: no PriorityClass with name high was found"
SILENCE = "a dry run that was not answered: 503"


def stopping() -> World:
    """Return a job whose trainer stops for a layout that the API server accepts."""
    return World().run().edit(**TWO_CRITICS).settle()


def refused() -> World:
    """Return one that was edited again, to a layout that the API server refuses."""
    world = stopping()
    world.refusal = NO_CLASS
    return world.edit(**HIGH_PRIORITY).settle()


def has_layout_before(world: World) -> bool:
    """Return whether the job has the layout from before both edits."""
    pods = [group["template"]["spec"] for group in world.made[-1]["spec"]["workerGroupSpecs"]]
    return not any("priorityClassName" in pod for pod in pods) and world.status["ready"].endswith("/3")


def test_a_refused_one_is_named_at_once_and_the_trainer_still_stops() -> None:
    world = refused()

    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    assert world.condition(Condition.LAYOUT_APPLIED).message.endswith(NO_CLASS)
    assert world.status["phase"] == Phase.RESTARTING
    assert "completionTime" not in world.status["stop"]


def test_a_refused_one_leaves_the_next_attempt_the_pods_that_it_has() -> None:
    world = refused().trainer_stops_gracefully().settle()

    assert world.status["attempt"] == 1
    assert world.cluster_name == first_cluster()
    assert has_layout_before(world)
    assert world.condition(Condition.LAYOUT_APPLIED).message.endswith(NO_CLASS)

    world.refusal = ""
    world.wait(20).trainer_reports().settle().trainer_stops_gracefully().settle()
    assert world.made[-1]["spec"]["workerGroupSpecs"][1]["template"]["spec"]["priorityClassName"] == "high"
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)


def test_a_corrected_one_is_applied() -> None:
    world = refused()
    world.refusal = ""
    world.edit(**TWO_CRITICS).settle()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.REALLOCATING)

    world.trainer_stops_gracefully().settle()

    assert world.status["ready"] == "0/4"
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)


def test_one_that_the_rules_refuse_is_named_at_once_too() -> None:
    world = stopping().edit(**ILLEGAL).settle()

    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    assert "restartPolicy: 'Always'" in world.condition(Condition.LAYOUT_APPLIED).message


def test_a_trainer_that_does_not_stop_in_time_gets_pods_of_the_layout_before() -> None:
    world = refused().wait(600).settle()

    assert Reason.GRACE_PERIOD_EXCEEDED in world.said
    assert world.cluster_name != first_cluster()
    assert has_layout_before(world)
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)


def test_what_the_api_server_refuses_only_at_the_end_of_the_stop_is_not_applied() -> None:
    world = stopping()
    world.refusal = "spec.pools[1].podTemplate: violates PodSecurity"

    world.trainer_stops_gracefully().settle()

    assert world.cluster_name == first_cluster()
    assert has_layout_before(world)
    assert "violates PodSecurity" in world.condition(Condition.LAYOUT_APPLIED).message


def test_a_trainer_that_fails_instead_has_the_same_end() -> None:
    world = stopping()
    world.refusal = NO_CLASS

    world.edit(**HIGH_PRIORITY).trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()
    world.wait(10).settle()

    assert world.status["attempt"] == 1
    assert has_layout_before(world)


def test_an_api_server_that_does_not_answer_is_asked_until_the_grace_period_is_over() -> None:
    world = stopping()
    world.refusal, world.is_silent = SILENCE, True
    world.edit(**HIGH_PRIORITY).trainer_stops_gracefully().settle()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("Unknown", Reason.API_REQUEST_FAILED)
    assert world.status["attempt"] == 0

    world.refusal, world.is_silent = NO_CLASS, False
    world.settle()

    assert world.status["attempt"] == 1
    assert world.cluster_name == first_cluster()
    assert has_layout_before(world)


def test_a_silence_beyond_the_grace_period_stops_nothing() -> None:
    world = stopping()
    world.refusal, world.is_silent = SILENCE, True

    world.edit(**HIGH_PRIORITY).trainer_stops_gracefully().wait(600).settle()

    assert world.status["attempt"] > 0
    assert world.status["stop"]["completionTime"]


def test_each_edit_is_tried_once_until_the_trainer_has_stopped() -> None:
    world = stopping()
    assert world.tried == 1

    world.wait(3).settle().wait(3).trainer_reports().settle()
    assert world.tried == 1
    world.edit(**HIGH_PRIORITY).settle().wait(3).settle()
    assert world.tried == 2
    world.trainer_stops_gracefully().settle()
    assert world.tried == 3


def test_an_edit_while_the_job_is_being_suspended_is_not_tried() -> None:
    world = World().run().suspend().settle()
    world.refusal = NO_CLASS

    world.edit(**HIGH_PRIORITY, runPolicy={"suspend": True}).settle().trainer_stops_gracefully().settle()

    assert world.status["phase"] == Phase.SUSPENDED
    assert world.tried == 0


def test_an_edit_while_a_suspension_is_taken_back_is_tried() -> None:
    world = World().run().suspend().settle()
    world.refusal = NO_CLASS

    world.suspend(False).edit(**HIGH_PRIORITY).settle()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    world.trainer_stops_gracefully().settle()

    assert world.cluster_name == first_cluster()
    assert has_layout_before(world)
