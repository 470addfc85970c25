"""Which notifications a job has, and that they stay in its status until the receiver has them.

Every `World` has a receiver of all types, so the stories of the other tests write notifications, too.
"""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.notification import MAX_PENDING, NotificationType, PendingNotification
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Ray, RayState, Trouble
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile import show_fault
from ppojob_operator.reconcile.outbox import EVENTS, REPEATED_AFTER, STATES, with_notifications
from tests.unit.operator.reconcile.worlds import World

HOUR = REPEATED_AFTER.total_seconds()
NO_IMAGE = Trouble(Reason.IMAGE_PULL_FAILED, "ErrImagePull: no such image")
NO_GPUS = Trouble(Reason.INSUFFICIENT_GPUS, "0/1 nodes are available")


def types(world: World) -> list[str]:
    """Return the types of what is pending."""
    return [each["type"] for each in world.pending]


def test_a_job_that_succeeds_is_notified_at_its_start_and_at_its_end() -> None:
    world = World().run()
    world.trainer_reports(
        step=8, reward=0.75, checkpoint={"step": 8, "path": "/data/step-8", "time": "2026-03-01T13:00:00Z"}
    )
    world.ray_says(RayState.SUCCEEDED).settle()

    assert types(world) == ["started", "succeeded"]
    started, succeeded = (PendingNotification.model_validate(each) for each in world.pending)
    assert (started.phase, started.attempt, started.step, started.total_steps) == (Phase.RUNNING, 0, 1, 8)
    assert (started.reason, started.checkpoint) == (Reason.TRAINING, None)
    assert (succeeded.phase, succeeded.reason) == (Phase.SUCCEEDED, Reason.TRAINER_SUCCEEDED)
    assert (succeeded.step, succeeded.reward, succeeded.checkpoint) == (8, "0.75", "/data/step-8")
    assert succeeded.message == world.condition(Condition.COMPLETE).message
    assert [started.number, succeeded.number] == [1, 2]


def test_a_retry_and_the_end_of_the_retries_are_notified_with_the_cause() -> None:
    world = World(runPolicy={"backoffLimit": 1}).run()
    world.trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()
    assert types(world) == ["started", "retried"], "the failure's Warning Event needs no attention of its own"
    assert world.pending[-1]["reason"] == Reason.NON_FINITE
    assert world.pending[-1]["attempt"] == 1
    assert "it broke" in world.pending[-1]["message"]

    world.wait(600).settle()
    world.wait(20).trainer_reports()
    world.settle()
    world.trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()

    assert types(world) == ["started", "retried", "started", "failed"]
    assert world.pending[-1]["phase"] == Phase.FAILED
    assert world.pending[-1]["message"] == world.condition(Condition.FAILED).message


def test_a_suspension_is_notified_when_the_job_has_no_trainer_any_more() -> None:
    world = World().run()
    world.suspend().settle()
    assert types(world) == ["started"]

    world.trainer_stops_gracefully().settle()

    assert types(world) == ["started", "suspended"]
    assert world.pending[-1]["phase"] == Phase.SUSPENDED


def test_another_run_on_request_is_notified() -> None:
    world = World(runPolicy={"backoffLimit": 0}).run()
    world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.USER).settle()

    world.ask_for_a_retry().look()

    assert types(world) == ["started", "failed", "restarted"]
    assert world.pending[-1]["reason"] == Reason.RETRIED
    assert world.pending[-1]["attempt"] == 1


def test_a_job_in_a_queue_is_notified_once_while_it_waits() -> None:
    world = World(runPolicy={"queueName": "gpus"}).settle()
    world.wait(60).settle()

    assert types(world) == ["queued"]


def test_a_spec_that_cannot_be_run_needs_attention_with_the_words_of_the_condition() -> None:
    world = World(pools=[{"name": "actor", "gpusPerNode": 2}]).settle()

    assert types(world) == ["attention"]
    assert world.pending[0]["reason"] == Reason.INVALID_SPEC
    assert world.pending[0]["message"] == world.condition(Condition.ACCEPTED).message[:1000]


def test_a_problem_that_comes_and_goes_is_notified_once_an_hour() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 100_000}).settle()

    def comes_and_goes() -> None:
        world.pods_become(ready=False, trouble=NO_IMAGE).settle()
        world.pods_become(ready=False).settle()

    comes_and_goes()
    world.wait(HOUR / 4)
    comes_and_goes()
    assert [each["reason"] for each in world.pending] == [Reason.IMAGE_PULL_FAILED]

    world.wait(HOUR)
    comes_and_goes()
    assert [each["reason"] for each in world.pending] == [Reason.IMAGE_PULL_FAILED] * 2
    assert world.said.count(Reason.IMAGE_PULL_FAILED) == 3


def test_pods_that_wait_for_gpus_need_nobody() -> None:
    world = World().settle()
    world.pods_become(ready=False, trouble=NO_GPUS).settle()

    assert Reason.INSUFFICIENT_GPUS in world.said
    assert world.pending == []


def test_what_the_receiver_has_is_removed_and_numbers_continue() -> None:
    world = World().run()
    world.settled = {1}

    world.settle()
    assert world.status["notifications"] == {"number": 1, "pending": [], "warnings": []}
    assert world.plan().status is None, "nothing is left to write"

    world.suspend().settle()
    world.trainer_stops_gracefully().settle()
    assert [(each["number"], each["type"]) for each in world.pending] == [(2, "suspended")]


def test_types_that_nobody_wants_are_not_written() -> None:
    world = World()
    world.types = frozenset({"failed"})

    assert "notifications" not in world.run().status


def test_without_a_receiver_what_was_pending_is_removed() -> None:
    world = World().run()
    world.types = frozenset()

    world.settle()

    assert world.pending == []


def test_a_receiver_that_never_answers_lets_the_status_grow_no_further() -> None:
    world = World(runPolicy={"backoffLimit": 0}).run()
    for request in range(MAX_PENDING):
        world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.USER).settle()
        world.ask_for_a_retry(str(request)).settle()
        world.pods_become(ready=True).see(ray=Ray()).settle()
        world.wait(20).trainer_reports()
        world.settle()

    numbers = [each["number"] for each in world.pending]
    assert numbers == list(range(numbers[-1] - MAX_PENDING + 1, numbers[-1] + 1))
    assert numbers[-1] == world.status["notifications"]["number"] == 1 + 3 * MAX_PENDING


def test_a_bug_in_the_operator_needs_attention() -> None:
    world = World().run()
    world.settled = {1}
    job = read_job(world.settle().raw)

    plan = with_notifications(show_fault(job, KeyError("x"), world.now), job, {"attention"}, {1}, world.now)

    assert plan.status is not None
    [pending] = plan.status["notifications"]["pending"]
    assert (pending["type"], pending["reason"], pending["number"]) == ("attention", Reason.OPERATOR_FAULT, 2)


def test_every_type_has_its_cause() -> None:
    kinds = [kind for kind, _ in STATES.values()] + list(EVENTS.values()) + [NotificationType.ATTENTION]

    assert sorted(kinds) == sorted(NotificationType)


@pytest.mark.parametrize("kind", [kind for _, kind in STATES.values()])
def test_the_conditions_that_explain_a_state_exist(kind: str) -> None:
    assert kind in vars(Condition).values()
