"""A process is lost and no pod: the next attempt continues in the same RayCluster, where the other processes are."""

from collections.abc import Callable

import pytest

from ppojob_api.v1alpha1.constants import Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import RayState
from tests.unit.operator.reconcile.test_failure_policy import restart
from tests.unit.operator.reconcile.worlds import World, first_cluster


def lose_process(world: World) -> World:
    return world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE, only_processes=True).settle()


def kill_driver(world: World) -> World:
    return world.ray_says(RayState.FAILED, error_type="JOB_ENTRYPOINT_COMMAND_ERROR", exit_code=-9).settle()


@pytest.mark.parametrize("fail", [lose_process, kill_driver])
def test_the_cluster_is_kept_once(fail: Callable[[World], World]) -> None:
    world = fail(World().run())
    assert world.status["phase"] == Phase.RESTARTING
    assert world.cluster_name == first_cluster()

    restart(world)
    assert (world.status["attempt"], world.cluster_name) == (1, first_cluster())


@pytest.mark.parametrize("fail", [lose_process, kill_driver])
def test_a_second_failure_without_progress_replaces_the_cluster(fail: Callable[[World], World]) -> None:
    world = restart(lose_process(World().run()))

    fail(world)

    assert world.status["phase"] == Phase.RESTARTING
    assert "rayCluster" not in world.status, "it may be due to the pods"


def test_progress_lets_the_cluster_be_kept_again_but_not_for_ever() -> None:
    world = World().run()

    for step in range(1, 11):
        lose_process(world)
        assert world.cluster_name == first_cluster()
        restart(world, step=step)
    lose_process(world)
    assert "rayCluster" not in world.status, "the pods may be the cause, though there is progress"


def test_a_loss_of_which_the_pods_may_be_the_cause_replaces_the_cluster() -> None:
    world = World().run().trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()

    assert "rayCluster" not in world.status


def test_a_pod_that_is_not_ready_may_be_on_a_lost_node_whatever_the_trainer_says() -> None:
    world = lose_process(World().run().pods_become(ready=False, pool="critic"))

    assert "rayCluster" not in world.status
