"""Who has never run fails at the startup deadline; who has run waits on; and pods that are ready get their trainer."""

from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Ray, RayState, Trouble
from tests.unit.operator.reconcile.worlds import World

NO_GPUS = Trouble(Reason.INSUFFICIENT_GPUS, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
FAILED = ("True", Reason.STARTUP_DEADLINE_EXCEEDED)
DELAYED = ("False", Reason.STARTUP_DELAYED)
DAY = 86_400


def limited(**changes: Any) -> World:
    """Return a job with a startup deadline of a minute."""
    return World(runPolicy={"startupDeadlineSeconds": 60, "partialPodsTimeoutSeconds": 365 * DAY}, **changes)


def without_room(world: World) -> World:
    """Let the pods of the current RayCluster find no room."""
    return world.pods_become(ready=True).pods_become(ready=False, pool="critic", trouble=NO_GPUS)


def after_a_lost_head() -> World:
    """Return a job that ran for three days, lost its head, and finds no room for a new one since 12:00:30."""
    world = limited().run().wait(3 * DAY - 20)
    world.trainer_reports(checkpoint={"step": 700, "path": "/c", "time": "2026-03-04T11:59:00Z"}).settle()
    world.pod_is_gone("head").settle().wait(10).settle()
    return without_room(world)


def test_a_job_that_has_run_waits_on_for_room_and_says_since_when() -> None:
    world = after_a_lost_head()
    assert world.wait(59).settle().verdict(Condition.PROGRESSING) == ("False", Reason.RESTARTING)
    assert world.plan().requeue_after == 1

    for _ in range(100):
        world.wait(DAY / 100).settle()

    assert world.verdict(Condition.PROGRESSING) == DELAYED
    message = world.condition(Condition.PROGRESSING).message
    assert message.startswith(
        "attempt 1 has waited to start since 2026-03-04 12:00:10 UTC; it keeps waiting, nothing is lost"
    )
    assert "from its checkpoint of step 700: InsufficientGPUs: pool critic requests 1" in message
    assert world.said.count(Reason.STARTUP_DELAYED) == 1
    assert (world.status["phase"], world.status["attempt"]) == (Phase.RESTARTING, 1)
    assert world.plan().status is None, "it is written once"


def test_it_continues_when_there_is_room_again() -> None:
    world = after_a_lost_head().wait(DAY).settle()

    world.pods_become(ready=True).see(ray=Ray()).settle()

    assert world.status["submissionId"].endswith("-1")
    assert world.verdict(Condition.PROGRESSING) == ("False", Reason.STARTING)
    assert world.status["retries"]["total"] == 1


def fails_at_once(world: World) -> World:
    return world.run().trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle().wait(10).settle()


def is_suspended_before_it_reports(world: World) -> World:
    world.settle().pods_become(ready=True).see(ray=Ray()).settle().suspend().settle()
    return world.trainer_stops_gracefully().settle().suspend(False).settle()


def is_suspended_before_it_begins(world: World) -> World:
    return world.settle().suspend().settle().suspend(False).settle()


def is_edited_before_it_begins(world: World) -> World:
    pools = [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1, "nodeSelector": {"gpu": "a"}}]
    return world.settle().edit(pools=pools).settle()


@pytest.mark.parametrize("story", [fails_at_once, is_suspended_before_it_reports])
def test_whoever_was_sent_once_has_run(story: Any) -> None:
    world = without_room(story(limited()))

    assert world.wait(61).settle().verdict(Condition.PROGRESSING) == DELAYED


@pytest.mark.parametrize("story", [World.settle, is_suspended_before_it_begins, is_edited_before_it_begins])
def test_whoever_was_never_sent_has_not(story: Any) -> None:
    world = without_room(story(limited()))

    assert world.wait(60).settle().verdict(Condition.FAILED) == FAILED


def test_a_job_whose_pods_are_ready_is_sent_however_late_it_is_seen() -> None:
    world = limited().settle().pods_become(ready=True).see(ray=Ray()).wait(DAY)

    plan = world.look()

    assert plan.submission is not None
    assert world.settle().status["phase"] == Phase.STARTING


def test_a_dashboard_that_is_not_up_yet_is_waited_for_when_the_operator_comes_back() -> None:
    world = limited().settle().pods_become(ready=True).settle().wait(DAY)
    world.see(leading_since=world.now, ray=Ray(problem="connection refused")).settle()
    assert world.verdict(Condition.SUBMITTED) == ("False", Reason.NOT_SUBMITTED)

    world.wait(30).see(ray=Ray()).settle()

    assert world.verdict(Condition.SUBMITTED) == ("True", Reason.TRAINER_SUBMITTED)


def test_a_dashboard_that_never_answers_fails_a_job_that_never_ran() -> None:
    world = limited().settle().wait(50).pods_become(ready=True).settle()

    world.wait(59).settle()
    assert world.status["phase"] == Phase.STARTING
    world.wait(1).settle()

    assert world.verdict(Condition.FAILED) == FAILED
    assert "NotSubmitted: Ray's dashboard" in world.condition(Condition.FAILED).message


def test_a_cluster_that_nobody_could_make_has_the_whole_time_once_it_is_made() -> None:
    world = limited()
    world.look()
    world.see(clusters=()).wait(DAY).see(leading_since=world.now)
    world.look()
    [cluster] = world.observed.clusters
    world.see(clusters=(replace(cluster, created=world.now),)).settle()

    assert without_room(world.wait(59)).settle().status["phase"] == Phase.STARTING
    assert world.wait(1).settle().verdict(Condition.FAILED) == FAILED


def test_a_cluster_that_is_refused_again_and_again_fails_the_job() -> None:
    world = limited().settle().see(clusters=(), last_error="exceeded quota").wait(59)
    status = world.plan().status
    assert status is not None
    assert status["phase"] == Phase.STARTING

    status = world.wait(1).plan().status

    assert status is not None
    assert "ClusterRefused: exceeded quota" in status["lastFailure"]["message"]


def moved(critic: int) -> World:
    """Return a job whose critic autoBalance has just given other nodes, and that finds no room."""
    auto = {"enabled": True, "intervalMinutes": 10}
    bounds = {"nodes": 2, "minNodes": 1, "maxNodes": 4}
    pools = [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1, **bounds}]
    world = begin(limited(pools=pools, autoBalance=auto).settle())
    advise(world.wait(601), critic).settle()
    assert world.status["effectivePools"] == [{"name": "critic", "nodes": critic, "specNodes": 2}]
    world.trainer_stops_gracefully().settle()
    return without_room(world)


def begin(world: World) -> World:
    """Bring all pods of the layout in force up, and the trainer to its first report."""
    world.pods_become(ready=True)
    critic = next(pod for pod in world.observed.pods if pod.pool == "critic")
    nodes = world.status["effectiveLayout"]["pools"][1]["nodes"]
    more = [replace(critic, name=f"{critic.name}-{number}") for number in range(1, nodes)]
    ray = world.observed.ray or Ray()
    world.see(pods=(*world.observed.pods, *more), ray=ray).settle()
    return world.wait(20).trainer_reports().settle()


def advise(world: World, critic: int) -> World:
    """Let the trainer advise other nodes for the critic."""
    sizes = [{"name": "actor", "nodes": 1, "gpusPerNode": 2}, {"name": "critic", "nodes": critic, "gpusPerNode": 1}]
    advice = {"pools": sizes, "gpus": 2 + critic, "stepTimePercent": -9}
    return world.trainer_reports(recommendation="more", layoutAdvice=[advice])


def test_without_room_for_more_pods_autobalance_goes_back_to_the_spec() -> None:
    world = moved(critic=3)

    world.wait(60).settle()

    assert "effectivePools" not in world.status
    assert [group["replicas"] for group in world.made[-1]["spec"]["workerGroupSpecs"]] == [1, 2]
    [words] = [words for words in world.words if "reverts" in words]
    assert words.startswith(
        "autoBalance reverts to the nodes of the spec (pool critic: nodes 3 -> 2), because there is"
    )
    assert "InsufficientGPUs: pool critic requests 1" in words
    assert world.status["retries"]["total"] == 0
    begin(world)
    assert (world.status["phase"], world.status["attempt"]) == (Phase.RUNNING, 2)


def test_then_it_does_not_ask_for_more_again_until_the_job_was_stopped_otherwise() -> None:
    world = begin(moved(critic=3).wait(60).settle())

    advise(world.wait(601), 3).settle()
    assert "effectivePools" not in world.status
    world.suspend().settle().trainer_stops_gracefully().settle().suspend(False).settle()
    advise(begin(world).wait(601), 3).settle()

    assert world.status["effectivePools"] == [{"name": "critic", "nodes": 3, "specNodes": 2}]


def test_fewer_pods_may_still_be_asked_for() -> None:
    world = begin(moved(critic=3).wait(60).settle())

    advise(world.wait(601), 1).settle()

    assert world.status["effectivePools"] == [{"name": "critic", "nodes": 1, "specNodes": 2}]


def test_where_autobalance_asked_for_less_the_spec_would_find_no_room_either() -> None:
    world = moved(critic=1)

    world.wait(DAY).settle()

    assert world.status["effectivePools"] == [{"name": "critic", "nodes": 1, "specNodes": 2}]
    assert world.verdict(Condition.PROGRESSING) == DELAYED


def test_a_late_attempt_ends_at_the_active_deadline_nevertheless() -> None:
    world = limited().edit(runPolicy={"startupDeadlineSeconds": 60, "activeDeadlineSeconds": 500}).run()
    without_room(world.ray_says(RayState.STOPPED).settle().pod_is_gone("head").wait(100)).settle()

    world.wait(400).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.ACTIVE_DEADLINE_EXCEEDED)
