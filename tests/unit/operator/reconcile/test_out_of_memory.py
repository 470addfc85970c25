"""A pod that exceeded its memory limit is a failure of the user's program, whatever the trainer reports."""

from dataclasses import replace

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Ray, RayState, Trouble
from tests.unit.operator.reconcile.worlds import World, first_cluster


def killed(container: str) -> Trouble:
    """Return the trouble of a pod whose container exceeded its memory limit."""
    words = f"container {container} exceeded its memory limit of 64Gi and was terminated"
    return Trouble(Reason.OUT_OF_MEMORY, words, container, 137)


OOM = killed("ray-worker")


@pytest.mark.parametrize(
    ("group", "container", "remedy"),
    [
        ("critic", "ray-worker", "raise memory of resourcesPerGPU of pool critic"),
        ("head", "ray-head", "raise spec.head.resources.memory"),
        ("critic", "logger", "raise the memory limit of that container in podTemplate of pool critic"),
        ("head", "logger", "raise the memory limit of that container in podTemplate of the head"),
    ],
)
@pytest.mark.parametrize("is_deleting", [False, True])
def test_a_pod_beyond_its_memory_is_the_users_to_fix(
    group: str, container: str, remedy: str, is_deleting: bool
) -> None:
    world = World().run().pods_become(ready=False, pool=group, trouble=killed(container))
    if is_deleting:
        world.pod_leaves(group)

    world.trainer_reports().settle()

    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == (Reason.OUT_OF_MEMORY, 137)
    words = f"container {container} exceeded its memory limit of 64Gi and was terminated"
    assert failure["message"] == f"pod {first_cluster()}-{group}: {words}: {remedy}"
    assert world.totals == (1, 0, 0)
    assert "rayCluster" not in world.status


@pytest.mark.parametrize("kind", [FailureKind.INFRASTRUCTURE, FailureKind.USER])
def test_a_lost_worker_whose_pod_ran_out_of_memory_is_the_users_to_fix(kind: FailureKind) -> None:
    world = World().run().pods_become(ready=False, pool="critic", trouble=OOM)

    world.trainer_fails(Reason.WORKER_LOST, kind, "critic rank 0 is gone").settle()

    assert world.status["lastFailure"]["reason"] == Reason.OUT_OF_MEMORY
    assert world.totals == (1, 0, 0)


def run_out_of_memory(world: World) -> World:
    world.pods_become(ready=False, pool="critic", trouble=OOM)
    world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()
    return world.wait(60).settle()


def test_a_second_attempt_in_a_row_that_runs_out_of_memory_with_the_same_settings_ends_the_job() -> None:
    world = run_out_of_memory(World(runPolicy={"backoffLimit": 9}).run())
    assert world.status["attempt"] == 1
    world.pods_become(ready=True).see(ray=Ray()).settle()

    run_out_of_memory(world)

    assert world.verdict(Condition.FAILED) == ("True", Reason.OUT_OF_MEMORY)
    message = world.condition(Condition.FAILED).message
    assert message.startswith("attempts 0 and 1 ran out of memory with the same settings")


def test_other_settings_get_separate_attempts() -> None:
    world = run_out_of_memory(World(runPolicy={"backoffLimit": 9}).run())
    world.edit(critic={"miniBatchSize": 8, "maxTokensPerGPU": 4096}).settle()
    world.pods_become(ready=True).see(ray=Ray()).settle()

    run_out_of_memory(world)

    assert world.status["phase"] != Phase.FAILED
    assert world.status["lastFailure"]["reason"] == Reason.OUT_OF_MEMORY


@pytest.mark.parametrize("is_reported", [True, False])
def test_memory_that_ended_rays_container_names_the_loss_though_it_runs_again(is_reported: bool) -> None:
    world = World().run()
    pods = (replace(pod, out_of_memory=OOM if pod.pool == "critic" else None) for pod in world.observed.pods)
    world.see(pods=tuple(pods)).settle()
    assert world.status["attempt"] == 0, "nothing is lost so far"

    if is_reported:
        world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()
    else:
        world.see(ray=Ray()).wait(31).trainer_reports().settle()

    assert world.status["lastFailure"]["reason"] == Reason.OUT_OF_MEMORY
    assert world.observed.clusters == (), "else the next attempt would find the same pod"


def test_a_wrong_path_and_a_graceful_stop_stay_so_though_a_pod_wanted_memory() -> None:
    world = World().run().pods_become(ready=False, pool="critic", trouble=OOM)
    world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.MODEL_NOT_FOUND)

    world = World().run().pods_become(ready=False, pool="critic", trouble=OOM).trainer_stops_gracefully()
    world.settle()
    assert world.status["lastFailure"]["reason"] == Reason.INTERRUPTED


def test_a_trainer_that_was_killed_most_likely_wanted_memory() -> None:
    world = World().run()

    world.ray_says(RayState.FAILED, error_type="JOB_ENTRYPOINT_COMMAND_ERROR", exit_code=-9).settle()

    assert world.status["lastFailure"]["reason"] == Reason.OUT_OF_MEMORY
    assert "spec.head.resources.memory (8Gi)" in world.status["lastFailure"]["message"]
