"""Who took a pod is in the failure's name, with the exit code and the place of the log where they are known."""

from dataclasses import replace

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Pod, Ray, RayState, Trouble
from tests.unit.operator.reconcile.worlds import World, first_cluster

PREEMPTED = Trouble(Reason.PREEMPTED, "PreemptionByScheduler: preempting to accommodate a higher priority pod")
LOST = Trouble(Reason.NODE_LOST, "DeletionByTaintManager: deleting due to NoExecute taint")
DEAD = Trouble(Reason.POD_FAILED, "container ray-worker ended: Error, exit code 7", "ray-worker", 7)
LOG = "/data/ppojob/rl-team/arithmetic/logs/attempt-0/driver.log"


def take(world: World, group: str, trouble: Trouble, *, is_deleting: bool = True) -> World:
    """Let somebody take a pod away ("head" is the head's): its hook holds it."""

    def taken(pod: Pod) -> Pod:
        return replace(pod, disruption=trouble, is_deleting=is_deleting) if (pod.pool or "head") == group else pod

    return world.see(pods=tuple(map(taken, world.observed.pods)))


@pytest.mark.parametrize("trouble", [PREEMPTED, LOST])
def test_a_worker_that_is_taken_away_names_the_failure_after_the_trainer_has_stopped_gracefully(
    trouble: Trouble,
) -> None:
    world = take(World().run(), "critic", trouble).settle()
    assert world.verdict(Condition.POOLS_READY) == ("False", trouble.reason)
    assert trouble.reason in world.said

    world.wait(20).trainer_stops_gracefully().settle()

    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == (trouble.reason, 130)
    lost = f"pod {first_cluster()}-critic: {trouble.message}; pool critic has only 0 of its 1 pods ready; "
    assert failure["message"] == f"{lost}the trainer reported Interrupted: stopped gracefully after step 3"
    assert world.totals == (0, 0, 1)


def test_who_took_a_worker_is_remembered_when_its_pod_is_gone() -> None:
    world = take(World().run(), "critic", PREEMPTED).settle()
    world.wait(5).pod_is_gone("critic").settle()
    said = world.condition(Condition.POOLS_READY).message

    world.wait(26).trainer_reports().settle()

    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["message"]) == (Reason.PREEMPTED, said)
    assert PREEMPTED.message in said


def test_who_took_pods_of_an_earlier_attempt_is_not_remembered() -> None:
    world = take(World().run(), "critic", PREEMPTED).settle()
    world.trainer_stops_gracefully().settle().wait(10).settle()
    world.pods_become(ready=True).see(ray=Ray()).settle()
    assert world.status["attempt"] == 1

    world.pod_is_gone("critic").settle().wait(31).trainer_reports().settle()

    assert world.status["lastFailure"]["reason"] == Reason.POD_LOST


def test_a_stop_that_was_asked_for_stays_one_though_a_pod_is_taken_away() -> None:
    world = World().run().suspend()
    world.settle()
    take(world, "critic", PREEMPTED)

    world.trainer_stops_gracefully().settle()

    assert "lastFailure" not in world.status
    assert world.verdict(Condition.SUSPENDED) == ("True", Reason.SUSPENDED)


def test_what_the_trainer_found_wrong_stays_its_own_though_a_pod_is_taken_away() -> None:
    world = take(World().run(), "critic", LOST)

    world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.MODEL_NOT_FOUND)


def test_a_pod_that_is_to_be_taken_away_and_still_runs_is_no_loss() -> None:
    world = take(World().run(), "head", PREEMPTED, is_deleting=False)
    take(world, "critic", PREEMPTED, is_deleting=False)

    world.settle()

    assert world.status["attempt"] == 0
    assert world.verdict(Condition.POOLS_READY) == ("True", Reason.PODS_READY)


@pytest.mark.parametrize("trouble", [PREEMPTED, LOST])
def test_a_head_that_is_taken_away_is_held_and_names_the_failure_when_it_is_gone(trouble: Trouble) -> None:
    world = take(World().run(), "head", trouble).settle()
    for _ in range(30):
        world.wait(10).trainer_reports().settle()
    assert world.status["attempt"] == 0, "another attempt would fence the trainer out before its checkpoint"
    assert world.verdict(Condition.POOLS_READY) == ("False", trouble.reason)

    world.pod_is_gone("head").settle()

    failure = world.status["lastFailure"]
    assert failure["reason"] == trouble.reason
    assert failure["message"].startswith(f"the head pod of the RayCluster {first_cluster()} was deleted: pod")
    assert trouble.message in failure["message"]
    assert failure["message"].endswith(LOG)
    assert world.totals == (0, 0, 1)


def test_a_silent_head_whose_node_does_not_answer_is_a_lost_node() -> None:
    world = World().run().pods_become(ready=False, pool="head")
    take(world, "head", Trouble(Reason.NODE_LOST, "its node does not respond"), is_deleting=False)
    world.settle()

    world.wait(121).settle()

    failure = world.status["lastFailure"]
    assert failure["reason"] == Reason.NODE_LOST
    assert "its node does not respond" in failure["message"]


def test_a_lost_worker_has_the_exit_code_of_its_container() -> None:
    world = World().run().pods_become(ready=False, pool="critic", trouble=DEAD).settle()

    world.wait(31).trainer_reports().settle()

    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == (Reason.POD_LOST, 7)


def test_a_lost_head_has_the_exit_code_of_its_container_and_the_place_of_the_drivers_log() -> None:
    world = World().run().pods_become(ready=False, pool="head", trouble=replace(DEAD, container="ray-head"))

    world.settle()

    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == (Reason.HEAD_LOST, 7)
    assert failure["message"].endswith(f"the driver's log is in the storage: {LOG}")


def test_a_trainer_that_ray_lost_says_where_its_log_is() -> None:
    world = World().run()

    world.ray_says(RayState.FAILED, error_type="JOB_SUPERVISOR_ACTOR_DIED", message="The actor died\nmore").settle()

    message = world.status["lastFailure"]["message"]
    assert message == f"Ray lost the trainer: The actor died; the driver's log is in the storage: {LOG}"
