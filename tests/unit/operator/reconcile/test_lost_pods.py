"""Worker pods that are gone fail the attempt, those that are only not ready do not, and the others stay warm."""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Pod, Ray, RayJob, RayState, Trouble
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster


def test_warm_pods_that_are_not_ready_any_more_are_not_kept() -> None:
    world = World().run().pods_become(ready=False, pool="critic")

    world.ray_says(RayState.STOPPED)

    assert world.look().delete_clusters == (first_cluster(),)


@pytest.mark.parametrize("end", ["named", "unnamed", "unnoticed"])
def test_a_worker_that_is_replaced_costs_the_others_neither_their_pods_nor_their_place(end: str) -> None:
    world = World().run().pod_is_gone("critic")
    new = Pod(f"{first_cluster()}-critic-new", first_cluster(), "critic", created=world.now)
    world.settle().see(pods=(*world.observed.pods, new))

    if end == "unnoticed":
        world.wait(31).trainer_reports().settle()
    else:
        reason = Reason.WORKER_LOST if end == "named" else Reason.TRAINER_FAILED
        kind = FailureKind.INFRASTRUCTURE if end == "named" else FailureKind.USER
        world.trainer_fails(reason, kind).settle()
    assert world.status["retries"]["infrastructure"] == 1
    assert [cluster.name for cluster in world.observed.clusters] == [first_cluster()]
    assert world.wait(60).look().submission is None, "the new pod is not ready"

    sent = world.pods_become(ready=True, pool="critic", suffix="-new").look().submission

    assert sent is not None
    assert sent.submission_id == f"ppojob-{UID}-1"


def test_a_worker_that_is_there_and_silent_may_be_on_a_lost_node() -> None:
    world = World().run().pods_become(ready=False, pool="critic")

    world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()

    assert world.observed.clusters == ()


def test_a_failure_of_the_program_while_pods_were_lost_is_the_clusters_fault() -> None:
    world = World().run().pods_become(ready=True, pool="critic", suffix="-new")

    world.trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()

    assert world.status["lastFailure"]["reason"] == Reason.POD_LOST
    assert (
        "pool critic has other pods than those that the trainer started with" in world.status["lastFailure"]["message"]
    )
    assert world.status["retries"]["infrastructure"] == 1


def test_a_wrong_path_stays_a_wrong_path_though_pods_were_lost() -> None:
    world = World().run().pod_is_gone("critic")

    world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.MODEL_NOT_FOUND)


DEAD = Trouble(Reason.POD_FAILED, "container ray-worker ended: Error, exit code 1")


@pytest.mark.parametrize("change", ["gone", "failed", "replaced", "replaced and unready"])
def test_lost_pods_are_seen_at_once_and_fail_the_attempt_if_the_trainer_does_not(change: str) -> None:
    world = World().run()
    if change == "gone":
        world.pod_is_gone("critic")
    elif change == "failed":
        world.pods_become(ready=False, pool="critic", trouble=DEAD)
    else:
        world.pods_become(ready=change == "replaced", pool="critic", suffix="-new")

    world.settle()
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.POD_LOST)
    assert world.status["attempt"] == 0

    world.wait(31).trainer_reports().settle()
    assert world.status["attempt"] == 1
    assert world.status["lastFailure"]["reason"] == Reason.POD_LOST
    assert world.status["retries"]["infrastructure"] == 1


def test_pods_that_are_there_and_not_ready_are_not_lost_while_the_trainer_reports() -> None:
    world = World().run().pods_become(ready=False, pool="critic")

    for step in range(2, 62):
        world.wait(10).trainer_reports(step=step).settle()
        assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    assert world.status["attempt"] == 0
    assert world.cluster_name == first_cluster()

    world.pods_become(ready=True, pool="critic").settle()
    assert world.verdict(Condition.POOLS_READY) == ("True", Reason.PODS_READY)


def test_pods_that_are_not_ready_are_lost_once_nobody_reports_any_more() -> None:
    world = World().run().pods_become(ready=False, pool="critic").settle()

    world.wait(119).settle()
    assert world.status["attempt"] == 0
    world.wait(2).settle()

    assert world.status["lastFailure"]["reason"] == Reason.POD_LOST
    assert world.observed.clusters == (), "the node may be lost"


def test_pods_that_come_back_in_time_do_no_harm() -> None:
    world = World().run().pods_become(ready=False, pool="critic")
    world.settle()

    world.wait(20).pods_become(ready=True, pool="critic").settle()
    world.wait(40).trainer_reports().settle()

    assert world.verdict(Condition.POOLS_READY) == ("True", Reason.PODS_READY)
    assert world.status["attempt"] == 0


@pytest.mark.parametrize("pool", ["head", "critic"])
def test_a_pod_that_is_held_until_the_trainer_has_stopped_fails_nothing_before(pool: str) -> None:
    world = World().run().pod_leaves(pool)

    for _ in range(30):
        world.wait(10).trainer_reports().settle()
    assert world.status["attempt"] == 0, "another attempt would fence the trainer out before its checkpoint"

    world.pod_is_gone(pool).wait(31).trainer_reports().settle()
    world.wait(31).trainer_reports().settle()
    assert world.status["attempt"] == 1
    assert world.status["retries"]["infrastructure"] == 1


@pytest.mark.parametrize("pool", ["head", "critic"])
def test_a_pod_that_leaves_for_ever_while_nobody_reports_is_lost(pool: str) -> None:
    world = World().run().pod_leaves(pool)

    for _ in range(30):
        world.wait(10).settle()

    assert world.status["attempt"] >= 1


def test_a_worker_that_leaves_for_longer_than_the_grace_period_is_lost() -> None:
    world = World(runPolicy={"stopGracePeriodSeconds": 100}).run().pod_leaves("critic")

    for _ in range(15):
        world.wait(10).trainer_reports().settle()

    assert world.status["lastFailure"]["reason"] == Reason.POD_LOST


def lose_the_critic_under_a_trainer_that_goes_on() -> World:
    """Return a job whose next attempt gets the same RayCluster, in which the old driver still runs."""
    world = World().run().pod_is_gone("critic")
    new = Pod(f"{first_cluster()}-critic-new", first_cluster(), "critic", created=world.now)
    world.settle().see(pods=(*world.observed.pods, new)).wait(31).trainer_reports()
    world.look()
    assert world.status["attempt"] == 1
    return world


def test_a_driver_that_still_runs_is_ended_before_the_next_one_is_sent() -> None:
    world = lose_the_critic_under_a_trainer_that_goes_on()
    world.hangs = True
    world.wait(1).look()
    assert world.stopped == [f"ppojob-{UID}-0"], "at once, in the pause too"

    world.wait(30).pods_become(ready=True, pool="critic", suffix="-new")
    for _ in range(5):
        assert world.wait(3).look().submission is None
    assert world.condition(Condition.SUBMITTED).message == f"Ray has not stopped ppojob-{UID}-0 yet"

    world.hangs = False
    world.look()
    plan = world.look()
    assert plan.submission is not None
    assert plan.submission.submission_id == f"ppojob-{UID}-1"
    assert plan.stop_submissions == ()


def test_a_driver_that_ray_cannot_end_holds_the_next_one_up_for_a_minute_only() -> None:
    world = lose_the_critic_under_a_trainer_that_goes_on()
    world.hangs = True
    world.wait(300).look()
    world.pods_become(ready=True, pool="critic", suffix="-new")

    world.look()
    assert world.wait(59).look().submission is None
    plan = world.wait(1).look()

    assert plan.submission is not None
    assert plan.stop_submissions == (f"ppojob-{UID}-0",), "asked once more"


def test_what_others_have_sent_to_ray_is_left_alone() -> None:
    world = World().run()
    assert world.observed.ray is not None
    others = RayJob("somebodys", RayState.RUNNING)
    world.see(ray=Ray((others, *world.observed.ray.jobs)))

    world.ray_says(RayState.STOPPED).settle().wait(10).settle()

    assert world.status["attempt"] == 1
    assert world.stopped == []
