"""A job that has ended runs again on request, from its last checkpoint and with a fresh budget."""

from typing import Any

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Cluster, FetchJob, Ray, RayState
from tests.unit.operator.reconcile.happenings import fresh, running, then
from tests.unit.operator.reconcile.test_failure_policy import restart, saved
from tests.unit.operator.reconcile.worlds import World, first_cluster

ADOPTED = '"adoptedUid"'


def failed(step: int | None = 5, **policy: Any) -> World:
    """Return a job that has failed because of its limit of retries."""
    world = World(runPolicy={"backoffLimit": 0, **policy}).run()
    if step is not None:
        world.trainer_reports(step=step, checkpoint=saved(step)).settle()
    return world.trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()


def start(world: World) -> World:
    """Bring the next attempt to a trainer that reports."""
    world.settle().pods_become(ready=True).see(ray=Ray()).settle()
    return world.wait(1).trainer_reports().settle()


def complete(total: int = 8) -> World:
    """Return a job that is complete after eight steps."""
    world = World(trainer={"totalSteps": total}).run()
    world.trainer_reports("Finished", 8, checkpoint=saved(8)).settle()
    return world.ray_says(RayState.SUCCEEDED).settle()


def test_a_failed_job_runs_again_with_a_fresh_budget_and_its_totals() -> None:
    world = failed()
    assert world.verdict(Condition.FAILED) == ("True", Reason.BACKOFF_LIMIT_EXCEEDED)

    world.wait(60).ask_for_a_retry().look()

    assert world.verdict(Condition.FAILED) == ("False", Reason.RETRIED)
    assert world.status["phase"] == Phase.RESTARTING
    assert "completionTime" not in world.status
    assert "lastFailure" not in world.status
    assert world.status["retry"] == {"request": "first", "time": "2026-03-01T12:01:20Z"}
    [words] = [words for words in world.words if words.startswith("attempt 1 resumes from the checkpoint of step 5")]
    assert "the job had ended with Failed: BackoffLimitExceeded: attempt 0 failed" in words
    assert "correct the cause" not in words
    assert start(world).status["phase"] == Phase.RUNNING
    assert (world.status["attempt"], world.status["retries"]["counted"]) == (1, 0)
    assert world.cluster_name != first_cluster()


def test_the_next_attempt_may_adopt_the_checkpoints_that_an_annotation_names() -> None:
    world = failed(None)
    assert ADOPTED not in (world.observed.config or {})[constants.JOB_FILE]

    world.annotations[constants.ANNOTATION_ADOPT] = "7c4a8d09"
    start(world.ask_for_a_retry())

    assert f'{ADOPTED}: "7c4a8d09"' in (world.observed.config or {})[constants.JOB_FILE]


def test_one_request_is_answered_once() -> None:
    world = start(failed().ask_for_a_retry())

    world.trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()
    assert world.status["phase"] == Phase.FAILED
    assert world.look().status is None

    assert start(world.ask_for_a_retry("second")).status["attempt"] == 2


def test_a_request_before_the_end_has_no_effect_after_it() -> None:
    world = World(runPolicy={"backoffLimit": 0}).run().ask_for_a_retry().settle()
    assert world.status["retry"]["refusal"] == "the job had not ended when the request came"

    world.trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()

    assert world.status["phase"] == Phase.FAILED


def test_without_a_checkpoint_it_starts_from_the_first_step() -> None:
    world = failed(step=None).ask_for_a_retry()

    assert "attempt 1 starts from step 0" in world.look().events[0].message


def test_what_is_left_of_the_end_is_deleted_first() -> None:
    world = failed().see(clusters=(Cluster("of-the-end"),))

    assert world.ask_for_a_retry().look().delete_clusters == ("of-the-end",)
    world.settle()

    assert [cluster.name for cluster in world.observed.clusters] == [world.cluster_name]


def test_the_active_deadline_begins_again() -> None:
    world = World(runPolicy={"activeDeadlineSeconds": 300}).run().wait(300).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.ACTIVE_DEADLINE_EXCEEDED)
    assert "`kubectl ppo retry arithmetic`" in world.condition(Condition.FAILED).message

    start(world.wait(1000).ask_for_a_retry())
    world.wait(250).trainer_reports().settle()
    assert world.status["phase"] == Phase.RUNNING

    assert world.wait(60).settle().verdict(Condition.FAILED) == ("True", Reason.ACTIVE_DEADLINE_EXCEEDED)


def test_the_startup_deadline_begins_again_for_a_job_that_has_never_run() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 60}).settle().wait(60).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)

    world.wait(1000).ask_for_a_retry().settle().wait(59).settle()
    assert world.status["phase"] == Phase.RESTARTING

    assert world.wait(1).settle().verdict(Condition.FAILED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)


def test_the_time_until_the_deletion_begins_again_at_the_next_end() -> None:
    world = failed(ttlSecondsAfterFinished=100).wait(50)

    start(world.ask_for_a_retry()).wait(60).settle()
    assert not world.is_deleted
    world.trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()
    world.wait(99).look()
    assert not world.is_deleted
    world.wait(1).look()

    assert world.is_deleted


def test_a_request_comes_before_the_deletion() -> None:
    world = failed(ttlSecondsAfterFinished=100).wait(100).ask_for_a_retry()

    world.look()

    assert (world.is_deleted, world.status["phase"]) == (False, Phase.RESTARTING)


def test_a_job_of_a_queue_waits_in_it_again() -> None:
    world = then(running(is_queued=True), "the trainer fails for good").ask_for_a_retry().settle()

    assert world.status["phase"] == Phase.QUEUED
    assert world.verdict(Condition.ADMITTED) == ("False", Reason.QUEUED)
    assert then(world.wait(50), "the queue admits", "the pods are ready", "Ray answers").status["attempt"] == 1


def test_a_suspended_job_stays_suspended() -> None:
    world = failed()
    world.edit(runPolicy={"suspend": True}).ask_for_a_retry().settle()

    assert world.status["phase"] == Phase.SUSPENDED


def test_a_fetch_that_failed_is_repeated() -> None:
    world = then(fresh(is_fetched=True).settle(), "the fetch fails")
    created = world.now
    assert world.verdict(Condition.FAILED) == ("True", Reason.FETCH_FAILED)

    assert world.wait(5000).ask_for_a_retry().look().delete_fetch_job
    world.see(fetch_job=FetchJob(created=created, is_deleting=True, failure="backoff limit")).wait(20).settle()
    assert world.status["phase"] == Phase.FETCHING
    world.see(fetch_job=None).settle()

    assert world.observed.fetch_job is not None
    assert then(world, "the fetch completes").verdict(Condition.SOURCES_FETCHED) == ("True", Reason.FETCHED)


def test_a_job_of_a_queue_whose_fetch_failed_runs_again_though_nobody_reads_its_claim() -> None:
    world = then(fresh(is_queued=True, is_fetched=True).settle(), "the fetch fails")
    assert "startTime" not in world.status
    world.see(claim=None, pods=(), fetch_job=None)

    world.ask_for_a_retry().settle()

    assert "refusal" not in world.status["retry"]
    assert world.status["phase"] == Phase.FETCHING


def test_one_attempt_that_ran_out_of_memory_after_a_retry_does_not_end_the_job() -> None:
    world = World().run().trainer_fails(Reason.OUT_OF_MEMORY, FailureKind.USER).settle()
    restart(world).trainer_fails(Reason.OUT_OF_MEMORY, FailureKind.USER).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.OUT_OF_MEMORY)
    assert "`kubectl ppo retry arithmetic`" in world.condition(Condition.FAILED).message

    start(world.ask_for_a_retry()).trainer_fails(Reason.OUT_OF_MEMORY, FailureKind.USER).settle()

    assert world.status["phase"] == Phase.RESTARTING


def test_an_invalid_spec_is_refused_and_said() -> None:
    world = then(running(), "the trainer fails for good", "the spec becomes invalid").ask_for_a_retry().settle()

    assert world.status["phase"] == Phase.FAILED
    assert "InvalidSpec: spec.trainer.totalSteps: -1" in world.status["retry"]["refusal"]
    assert Reason.RETRY_REFUSED in world.said

    assert then(world, "the spec is corrected", "a retry is requested").status["attempt"] == 1


def test_a_complete_job_continues_after_its_steps_were_raised() -> None:
    world = complete().edit(trainer={"totalSteps": 12}).ask_for_a_retry().settle()

    assert world.verdict(Condition.COMPLETE) == ("False", Reason.RETRIED)
    assert start(world).status["phase"] == Phase.RUNNING
    assert world.ray_says(RayState.SUCCEEDED).settle().verdict(Condition.COMPLETE)[0] == "True"


def test_a_complete_job_without_another_step_is_refused() -> None:
    world = complete().ask_for_a_retry().settle()

    assert world.status["phase"] == Phase.SUCCEEDED
    assert world.status["retry"]["refusal"] == (
        "nothing is left to do: 8 of 8 steps are done. Raise spec.trainer.totalSteps, then run "
        "`kubectl ppo retry arithmetic` again"
    )


def test_a_complete_job_without_a_checkpoint_is_refused() -> None:
    world = World().run().ray_says(RayState.SUCCEEDED).settle().ask_for_a_retry().settle()

    assert "has no checkpoint to continue from: create another PPOJob" in world.status["retry"]["refusal"]


@pytest.mark.parametrize("value", ["x" * 64, "x" * 200])
def test_a_long_value_is_answered_by_its_first_characters(value: str) -> None:
    world = failed().ask_for_a_retry(value).settle()

    assert world.status["retry"]["request"] == "x" * 64
    assert start(world).status["attempt"] == 1
