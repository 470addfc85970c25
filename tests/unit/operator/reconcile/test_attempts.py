"""An attempt that fails is counted against whom it belongs to, named, and tried again or not."""

from dataclasses import replace
from datetime import timedelta

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Cluster, Pod, Ray, RayJob, RayState, Trouble
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster


def killed(container: str) -> Trouble:
    """Return what is said of a pod whose container wanted too much memory."""
    words = f"container {container} went beyond its memory limit of 64Gi and was killed"
    return Trouble(Reason.OUT_OF_MEMORY, words, container, 137)


OOM = killed("ray-worker")


def test_a_users_failure_is_tried_again_on_the_same_pods_after_a_pause() -> None:
    world = World().run()

    world.trainer_fails(Reason.DATA_UNREADABLE, FailureKind.USER, "/data/x.parquet: no such column").settle()
    assert world.status["phase"] == Phase.RESTARTING
    assert world.status["attempt"] == 1
    assert world.status["retries"] == {"user": 1, "infrastructure": 0, "total": 1}
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
    assert world.status["retries"] == {"user": 0, "infrastructure": 1, "total": 1}
    assert not [cluster.name for cluster in world.observed.clusters]
    assert "rayCluster" not in world.status

    world.wait(10).settle()
    assert [cluster.name for cluster in world.observed.clusters] == [world.cluster_name]
    assert world.cluster_name != first_cluster()


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
    assert world.condition(Condition.SUBMITTED).message == f"Ray has not ended ppojob-{UID}-0 yet"

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


def test_a_worker_that_is_there_and_silent_may_be_on_a_lost_node() -> None:
    world = World().run().pods_become(ready=False, pool="critic")

    world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()

    assert world.observed.clusters == ()


def test_a_permanent_failure_ends_the_job_at_once_by_its_own_name() -> None:
    world = World().run()

    world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT, "/data/model: no such folder").settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.MODEL_NOT_FOUND)
    assert world.condition(Condition.FAILED).message == "/data/model: no such folder"
    assert world.status["phase"] == Phase.FAILED
    assert world.status["lastFailure"]["reason"] == Reason.MODEL_NOT_FOUND
    assert world.observed.clusters == ()


@pytest.mark.parametrize(
    ("kind", "field"),
    [(FailureKind.USER, "backoffLimit"), (FailureKind.INFRASTRUCTURE, "infrastructureBackoffLimit")],
)
def test_each_kind_of_failure_has_its_own_limit(kind: FailureKind, field: str) -> None:
    world = World(runPolicy={field: 1}).run()

    world.trainer_fails(Reason.TRAINER_FAILED, kind).settle()
    assert world.status["phase"] == Phase.RESTARTING

    world.wait(10).settle()
    world.pods_become(ready=True).see(ray=world.observed.ray or Ray()).settle()
    world.trainer_fails(Reason.TRAINER_FAILED, kind).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.BACKOFF_LIMIT_EXCEEDED)
    assert f"spec.runPolicy.{field} allows no more than 1 retries" in world.condition(Condition.FAILED).message
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


def test_a_trainer_that_was_killed_most_likely_wanted_memory() -> None:
    world = World().run()

    world.ray_says(RayState.FAILED, error_type="JOB_ENTRYPOINT_COMMAND_ERROR", exit_code=-9).settle()

    assert world.status["lastFailure"]["reason"] == Reason.OUT_OF_MEMORY
    assert "spec.head.resources.memory (8Gi)" in world.status["lastFailure"]["message"]


def test_a_trainer_that_ray_lost_is_the_clusters_fault() -> None:
    world = World().run()

    world.ray_says(RayState.FAILED, error_type="JOB_SUPERVISOR_ACTOR_DIED", message="The actor died\nmore").settle()

    assert world.status["lastFailure"]["message"] == "Ray lost the trainer: The actor died"
    assert world.status["retries"]["infrastructure"] == 1


def test_a_trainer_that_was_stopped_by_hand_is_tried_again() -> None:
    world = World().run()

    world.ray_says(RayState.STOPPED).settle()

    assert world.status["lastFailure"]["reason"] == Reason.INTERRUPTED
    assert world.status["retries"]["user"] == 1


def test_a_failure_of_the_program_while_pods_were_lost_is_the_clusters_fault() -> None:
    world = World().run().pods_become(ready=True, pool="critic", suffix="-new")

    world.trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()

    assert world.status["lastFailure"]["reason"] == Reason.POD_LOST
    assert "pool critic has other pods than the trainer began with" in world.status["lastFailure"]["message"]
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


@pytest.mark.parametrize(
    ("group", "container", "remedy"),
    [
        ("critic", "ray-worker", "raise memory of resourcesPerGPU of pool critic"),
        ("head", "ray-head", "raise spec.head.resources.memory"),
        ("critic", "logger", "raise the memory limit of that container in podTemplate of pool critic"),
        ("head", "logger", "raise the memory limit of that container in podTemplate of the head"),
    ],
)
@pytest.mark.parametrize("is_going", [False, True])
def test_a_pod_beyond_its_memory_is_the_users_to_mend(group: str, container: str, remedy: str, is_going: bool) -> None:
    world = World().run().pods_become(ready=False, pool=group, trouble=killed(container))
    if is_going:
        leave(world, group)

    world.trainer_reports().settle()

    failure = world.status["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == (Reason.OUT_OF_MEMORY, 137)
    words = f"container {container} went beyond its memory limit of 64Gi and was killed"
    assert failure["message"] == f"pod {first_cluster()}-{group}: {words}: {remedy}"
    assert world.status["retries"] == {"user": 1, "infrastructure": 0, "total": 1}
    assert "rayCluster" not in world.status


@pytest.mark.parametrize("kind", [FailureKind.INFRASTRUCTURE, FailureKind.USER])
def test_a_lost_worker_whose_pod_wanted_memory_is_the_users_to_mend(kind: FailureKind) -> None:
    world = World().run().pods_become(ready=False, pool="critic", trouble=OOM)

    world.trainer_fails(Reason.WORKER_LOST, kind, "critic rank 0 is gone").settle()

    assert world.status["lastFailure"]["reason"] == Reason.OUT_OF_MEMORY
    assert world.status["retries"] == {"user": 1, "infrastructure": 0, "total": 1}


def test_a_job_that_always_wants_memory_ends_at_the_users_limit() -> None:
    world = World(runPolicy={"backoffLimit": 2}).run()

    for _ in range(3):
        world.pods_become(ready=False, pool="critic", trouble=OOM)
        world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()
        world.wait(60).settle()
        if world.status["phase"] != Phase.FAILED:
            world.pods_become(ready=True).see(ray=Ray()).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.BACKOFF_LIMIT_EXCEEDED)


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


def test_a_wrong_path_and_a_stop_in_order_stay_so_though_a_pod_wanted_memory() -> None:
    world = World().run().pods_become(ready=False, pool="critic", trouble=OOM)
    world.trainer_fails(Reason.MODEL_NOT_FOUND, FailureKind.PERMANENT).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.MODEL_NOT_FOUND)

    world = World().run().pods_become(ready=False, pool="critic", trouble=OOM).trainer_stops_in_order()
    world.settle()
    assert world.status["lastFailure"]["reason"] == Reason.INTERRUPTED


@pytest.mark.parametrize(
    ("clusters", "words"),
    [
        ((), "was deleted"),
        ((Cluster(first_cluster(), is_going=True),), "was deleted"),
        ((Cluster(first_cluster(), is_suspended=True),), "was suspended"),
    ],
)
def test_a_lost_cluster_is_a_lost_head(clusters: tuple[Cluster, ...], words: str) -> None:
    world = World().run().see(clusters=clusters)

    world.look()

    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST
    assert words in world.status["lastFailure"]["message"]
    assert world.status["attempt"] == 1


def test_a_lost_head_ends_the_attempt_at_once() -> None:
    world = World().run().pod_is_gone("head")

    world.settle()

    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST
    assert world.observed.clusters == ()


def leave(world: World, pool: str) -> World:
    """Let a pod be deleted ("head" is the head's): its hook holds it."""
    pods = (replace(pod, is_going=(pod.pool or "head") == pool) for pod in world.observed.pods)
    return world.see(pods=tuple(pods))


@pytest.mark.parametrize("pool", ["head", "critic"])
def test_a_pod_that_is_held_until_the_trainer_has_stopped_fails_nothing_before(pool: str) -> None:
    world = leave(World().run(), pool)

    for _ in range(30):
        world.wait(10).trainer_reports().settle()
    assert world.status["attempt"] == 0, "another attempt would fence the trainer out before its checkpoint"

    world.pod_is_gone(pool).wait(31).trainer_reports().settle()
    world.wait(31).trainer_reports().settle()
    assert world.status["attempt"] == 1
    assert world.status["retries"]["infrastructure"] == 1


@pytest.mark.parametrize("pool", ["head", "critic"])
def test_a_pod_that_leaves_for_ever_while_nobody_reports_is_lost(pool: str) -> None:
    world = leave(World().run(), pool)

    for _ in range(30):
        world.wait(10).settle()

    assert world.status["attempt"] >= 1


def test_a_worker_that_leaves_for_longer_than_the_grace_period_is_lost() -> None:
    world = leave(World(runPolicy={"stopGracePeriodSeconds": 100}).run(), "critic")

    for _ in range(15):
        world.wait(10).trainer_reports().settle()

    assert world.status["lastFailure"]["reason"] == Reason.POD_LOST


def test_a_head_that_was_replaced_does_not_know_the_trainer_any_more() -> None:
    world = World().run().see(ray=Ray())

    world.wait(5).settle()
    assert world.status["attempt"] == 0, "Ray may need a moment"

    world.wait(30).trainer_reports().settle()
    assert world.status["attempt"] == 1
    assert "does not know the submission" in world.status["lastFailure"]["message"]


def test_a_silent_dashboard_does_no_harm_while_the_trainer_reports() -> None:
    world = World().run().see(ray=Ray(problem="no answer"))

    for _ in range(60):
        world.wait(10).trainer_reports().settle()

    assert world.status["attempt"] == 0


@pytest.mark.parametrize("minutes", [-3, 3])
def test_clocks_of_replicas_that_differ_do_no_harm_while_the_trainer_reports(minutes: int) -> None:
    world = World()
    world.skew = timedelta(minutes=minutes)
    world.run().see(ray=Ray(problem="no answer"))

    for _ in range(30):
        world.wait(10).trainer_reports().settle()
    assert world.status["attempt"] == 0

    world.wait(119).settle()
    assert world.status["attempt"] == 0
    world.wait(2).settle()
    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST, "by one clock, whatever the other says"


@pytest.mark.parametrize("minutes", [-3, 3])
def test_a_report_belongs_to_the_attempt_that_it_names_whatever_its_time(minutes: int) -> None:
    world = World()
    world.skew = timedelta(minutes=minutes)
    world.run()
    assert world.verdict(Condition.PROGRESSING) == ("True", Reason.TRAINING)

    world.trainer_fails(Reason.REWARD_FAILED, FailureKind.USER).settle()
    world.wait(10).settle()
    assert world.verdict(Condition.PROGRESSING) == ("False", Reason.STARTING)


def test_a_head_from_which_nobody_answers_is_lost() -> None:
    world = World().run().see(ray=Ray(problem="no answer within 20 s"))

    for _ in range(12):
        world.wait(10).settle()
        assert world.status["attempt"] == 0
    world.wait(10).settle()

    assert world.status["lastFailure"]["reason"] == Reason.HEAD_LOST
    assert "no answer within 20 s" in world.status["lastFailure"]["message"]


def test_an_attempt_that_was_never_sent_cannot_be_lost() -> None:
    world = World().settle().pods_become(ready=True)

    world.pod_is_gone("head").wait(500).settle()

    assert "lastFailure" not in world.status
