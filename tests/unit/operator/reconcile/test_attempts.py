"""An attempt that fails is counted against whom it belongs to, named, and tried again or not."""

from datetime import timedelta

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Ray, RayState
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster


def test_a_users_failure_is_tried_again_on_the_same_pods_after_a_pause() -> None:
    world = World().run()

    world.trainer_fails(Reason.DATA_UNREADABLE, FailureKind.USER, "/data/x.parquet: no such column").settle()
    assert world.status["phase"] == Phase.RESTARTING
    assert world.status["attempt"] == 1
    assert world.totals == (1, 0, 0)
    assert world.cluster_name == first_cluster()
    failure = world.status["lastFailure"]
    assert (failure["attempt"], failure["reason"], failure["exitCode"]) == (0, Reason.DATA_UNREADABLE, 1)
    assert failure["message"] == "/data/x.parquet: no such column"
    assert failure["logTail"].startswith("step 3")
    assert Reason.DATA_UNREADABLE in world.said

    assert world.wait(9).look().submission is None
    sent = world.wait(1).look().submission
    assert sent is not None
    assert sent.submission_id == f"ppojob-{UID}-1"
    assert "--attempt 1" in sent.entrypoint


def test_the_cluster_fails_and_the_next_attempt_gets_a_new_one() -> None:
    world = World().run()

    world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()
    assert world.totals == (0, 1, 0)
    assert not [cluster.name for cluster in world.observed.clusters]
    assert "rayCluster" not in world.status

    world.wait(10).settle()
    assert [cluster.name for cluster in world.observed.clusters] == [world.cluster_name]
    assert world.cluster_name != first_cluster()


def test_a_permanent_failure_ends_the_job_at_once_by_its_own_name() -> None:
    world = World().run()

    world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT, "/data/model: no such folder").settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.MODEL_NOT_FOUND)
    assert world.condition(Condition.FAILED).message == "/data/model: no such folder"
    assert world.status["phase"] == Phase.FAILED
    assert world.status["lastFailure"]["reason"] == Reason.MODEL_NOT_FOUND
    assert world.observed.clusters == ()


@pytest.mark.parametrize("kind", [FailureKind.USER, FailureKind.INFRASTRUCTURE])
def test_one_limit_counts_all_failures(kind: FailureKind) -> None:
    world = World(runPolicy={"backoffLimit": 1}).run()

    world.trainer_fails(Reason.TRAINER_FAILED, kind).settle()
    assert world.status["phase"] == Phase.RESTARTING

    world.wait(10).settle()
    world.pods_become(ready=True).see(ray=world.observed.ray or Ray()).settle()
    world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.BACKOFF_LIMIT_EXCEEDED)
    message = world.condition(Condition.FAILED).message
    assert "spec.runPolicy.backoffLimit allows no more than 1 retries without a newer checkpoint" in message
    assert "`kubectl ppo retry arithmetic` runs the job again" in message
    assert world.status["lastFailure"]["attempt"] == 1


def test_the_pause_grows_with_each_retry() -> None:
    world, pauses = World(runPolicy={"backoffLimit": 9}).run(), []

    for _ in range(8):
        world.trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()
        pauses.append(0)
        while world.wait(1).look().submission is None:
            pauses[-1] += 1

    assert [pause + 1 for pause in pauses] == [10, 20, 40, 80, 160, 320, 360, 360]


def test_a_report_of_an_earlier_attempt_says_nothing_of_this_one() -> None:
    world = World().run()
    world.wait(5).trainer_reports().ray_says(RayState.STOPPED).settle()

    world.wait(10).settle()
    assert world.verdict(Condition.SUBMITTED)[0] == "True"
    assert world.verdict(Condition.PROGRESSING) == ("False", Reason.STARTING)
    assert world.status["phase"] == Phase.STARTING

    world.wait(1).trainer_reports().settle()
    assert world.verdict(Condition.PROGRESSING) == ("True", Reason.TRAINING)


def test_a_failure_without_a_name_has_the_last_line_of_the_log_and_the_exit_code() -> None:
    world = World().run()
    world.log = "loading\nModuleNotFoundError: No module named 'x'\n\n"

    world.ray_says(RayState.FAILED, error_type="JOB_ENTRYPOINT_COMMAND_ERROR", exit_code=1).settle()

    failure = world.status["lastFailure"]
    assert failure["reason"] == Reason.TRAINER_FAILED
    assert failure["message"].endswith("ModuleNotFoundError: No module named 'x'")
    assert world.status["retries"]["user"] == 1


def test_a_name_that_other_output_overtook_is_found_nevertheless() -> None:
    world = World().run().trainer_fails(Reason.DATA_UNREADABLE, FailureKind.PERMANENT, "no such file")
    world.log += "\n".join(f"late line {i}" for i in range(300))

    world.settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.DATA_UNREADABLE)
    assert world.status["lastFailure"]["logTail"].endswith("late line 299")
    assert len(world.status["lastFailure"]["logTail"].splitlines()) == 100


def test_a_trainer_that_was_stopped_by_hand_is_tried_again() -> None:
    world = World().run()

    world.ray_says(RayState.STOPPED).settle()

    assert world.status["lastFailure"]["reason"] == Reason.INTERRUPTED
    assert world.status["retries"]["user"] == 1


@pytest.mark.parametrize("minutes", [-3, 3])
def test_a_report_belongs_to_the_attempt_that_it_names_whatever_its_time(minutes: int) -> None:
    world = World()
    world.skew = timedelta(minutes=minutes)
    world.run()
    assert world.verdict(Condition.PROGRESSING) == ("True", Reason.TRAINING)

    world.trainer_fails(Reason.REWARD_FAILED, FailureKind.USER).settle()
    world.wait(10).settle()
    assert world.verdict(Condition.PROGRESSING) == ("False", Reason.STARTING)
