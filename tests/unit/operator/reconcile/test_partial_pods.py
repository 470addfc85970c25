"""A job that has run does not keep some pods for ever while it waits for others."""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Ray
from tests.unit.operator.reconcile.happenings import NO_GPUS, NO_IMAGE
from tests.unit.operator.reconcile.worlds import World


def waiting() -> World:
    """Return a job in its second attempt, which has the actor's pod and no room for the critic's."""
    world = World(runPolicy={"partialPodsTimeoutSeconds": 600}).run().pod_is_gone("head").settle().wait(10).settle()
    return without_room(world).settle()


def without_room(world: World) -> World:
    return world.pods_become(ready=True).pods_become(ready=False, pool="critic", trouble=NO_GPUS)


def test_its_pods_are_released_after_the_limit_and_created_again_after_a_pause() -> None:
    world = waiting().wait(598).settle()
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.INSUFFICIENT_GPUS)
    before = world.cluster_name
    retries = world.status["retries"]

    world.wait(2).look()

    assert len(world.observed.clusters) == 0
    assert (world.status["attempt"], world.status["phase"]) == (2, Phase.RESTARTING)
    assert world.status["retries"] == retries, "it is no failure"
    assert world.said[-1] == Reason.PODS_RELEASED
    assert "attempt 1 has released its pods, because others did not start within 600 s" in world.words[-1]
    assert "spec.runPolicy.partialPodsTimeoutSeconds): InsufficientGPUs: pool critic requests 1" in world.words[-1]
    assert "attempt 1 has released its pods" in world.settle().condition(Condition.SUBMITTED).message
    world.wait(600).settle()
    assert len(world.observed.clusters) == 1
    assert world.cluster_name != before
    assert world.pods_become(ready=True).see(ray=Ray()).settle().verdict(Condition.SUBMITTED)[0] == "True"


def test_each_release_has_a_separate_pause() -> None:
    pauses = []
    for number in range(2):
        world = waiting()
        for _ in range(number + 1):
            world.wait(600).look()
            seconds = 0
            while not world.settle().observed.clusters:
                world.wait(10)
                seconds += 10
            without_room(world)
        pauses.append(seconds)

    assert pauses[0] != pauses[1]
    assert 0 < max(pauses) <= 600


def test_pods_that_are_placed_and_do_not_start_keep_gpus_too() -> None:
    world = waiting().pods_become(ready=False, trouble=NO_IMAGE).settle()

    world.wait(600).look()

    assert world.said[-1] == Reason.PODS_RELEASED


@pytest.mark.parametrize("change", ["all pods wait", "only the head is ready", "it has never run"])
def test_a_job_that_keeps_no_gpus_or_has_never_run_is_left_alone(change: str) -> None:
    world = World(runPolicy={"partialPodsTimeoutSeconds": 600}).settle() if change == "it has never run" else waiting()
    if change == "it has never run":
        without_room(world)
    elif change == "all pods wait":
        world.pods_become(ready=False, trouble=NO_GPUS)
    else:
        world.pods_become(ready=False, pool="actor", trouble=NO_GPUS)

    world.settle().wait(900).settle()

    assert len(world.observed.clusters) == 1
    assert Reason.PODS_RELEASED not in world.said
