"""The next RayCluster prefers other nodes than those on which a pod or a GPU was lost."""

from dataclasses import replace
from typing import Any

from ppojob_api.v1alpha1.constants import Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
from ppojob_operator.plan import Pod, Ray, RayState, Trouble
from tests.unit.operator.reconcile.test_failure_policy import DRAINED, SPOT, restart, saved
from tests.unit.operator.reconcile.worlds import World

SILENT = Trouble(Reason.NODE_LOST, "its node does not respond")
ADDRESSES = {"head": "10.0.0.1", "actor": "10.0.0.2", "critic": "10.0.0.3"}


def on_nodes(world: World, **nodes: str) -> World:
    """Place the pods: by default, all on one node."""

    def placed(pod: Pod) -> Pod:
        group = pod.pool or "head"
        return replace(pod, node=nodes.get(group, "good"), address=ADDRESSES[group])

    return world.see(pods=tuple(map(placed, world.observed.pods)))


def lose(world: World, trouble: Trouble, **changes: Any) -> World:
    """Disturb the critic's pod."""

    def disturbed(pod: Pod) -> Pod:
        return replace(pod, disruption=trouble, **changes) if pod.pool == "critic" else pod

    return world.see(pods=tuple(map(disturbed, world.observed.pods)))


def gpu_fails(world: World, group: str = "critic") -> World:
    """Let the trainer report a failed GPU of a pool's pod."""
    record = FailureRecord(
        reason=Reason.GPU_FAULT,
        message="critic rank 0: a GPU in the pod has failed: CUDA error: uncorrectable ECC error encountered",
        kind=FailureKind.INFRASTRUCTURE,
        address=ADDRESSES[group],
    )
    world.log = record.to_log_line()
    return world.ray_says(RayState.FAILED, error_type="JOB_ENTRYPOINT_COMMAND_ERROR", exit_code=1).settle()


def names(world: World) -> list[tuple[str, str]]:
    return [(node["name"], node["reason"]) for node in world.status.get("avoidedNodes", [])]


def affinities(manifest: dict[str, Any]) -> list[Any]:
    groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"].get("affinity") for group in groups]


def avoiding(*nodes: str) -> dict[str, Any]:
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    term = {"weight": 100, "preference": {"matchFields": fields}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


def test_a_node_that_does_not_respond_is_avoided_by_all_pods_of_the_next_cluster() -> None:
    world = lose(on_nodes(World().run(), critic="bad"), SILENT, is_ready=False).settle()
    assert affinities(world.made[0]) == [None, None, None]
    assert names(world) == [("bad", Reason.NODE_LOST)]

    world.trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()
    assert world.status["lastFailure"]["reason"] == Reason.NODE_LOST
    restart(world)

    assert affinities(world.made[-1]) == [avoiding("bad")] * 3
    assert world.status["rayCluster"]["avoidedNodes"] == ["bad"]


def test_a_node_is_known_though_its_pods_are_deleted_before_the_attempt_has_failed() -> None:
    world = on_nodes(World().run(), critic="bad", head="bad")
    world.see(pods=tuple(replace(pod, disruption=SPOT, is_deleting=pod.node == "bad") for pod in world.observed.pods))

    world.settle().pod_is_gone("critic").pod_is_gone("head").settle()

    assert world.status["lastFailure"]["reason"] == Reason.NODE_LOST
    assert affinities(restart(world).made[-1]) == [avoiding("bad")] * 3


def test_a_worker_that_is_replaced_elsewhere_does_not_release_the_others() -> None:
    world = lose(on_nodes(World().run(), critic="bad"), SPOT, is_deleting=True).settle()
    assert names(world) == [("bad", Reason.NODE_LOST)]

    world.wait(5).pod_is_gone("critic").trainer_stops_gracefully().settle()

    assert world.status["attempt"] == 1
    assert "rayCluster" in world.status, "Kubernetes itself places nothing on a lost node"


def test_a_failed_gpu_names_its_node_and_its_pods_are_not_reused() -> None:
    world = gpu_fails(on_nodes(World().run(), critic="bad"))

    assert names(world) == [("bad", Reason.GPU_FAULT)]
    assert world.status["lastFailure"]["reason"] == Reason.GPU_FAULT
    assert world.totals == (0, 1, 0)
    assert "rayCluster" not in world.status
    assert affinities(restart(world).made[-1])[0] == avoiding("bad")


def test_pods_on_an_avoided_node_are_not_reused_after_another_failure() -> None:
    world = lose(on_nodes(World().run(), critic="bad"), SILENT, is_ready=False).settle()
    lose(world, SILENT, is_ready=True).settle()

    world.trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()

    assert "rayCluster" not in world.status


def test_without_a_bad_node_the_pods_are_reused() -> None:
    world = on_nodes(World().run()).trainer_fails(Reason.NON_FINITE, FailureKind.USER).settle()

    assert "rayCluster" in world.status
    assert names(world) == []


def test_a_drained_node_is_not_avoided() -> None:
    world = lose(on_nodes(World().run(), critic="drained"), DRAINED, is_deleting=True).settle()

    assert names(world) == []


def test_a_node_is_forgotten_after_progress_on_other_nodes() -> None:
    world = restart(gpu_fails(on_nodes(World().run(), critic="bad")))
    on_nodes(world, critic="good").settle()
    assert names(world) == [("bad", Reason.GPU_FAULT)]

    world.trainer_reports(step=4, checkpoint=saved(4)).settle()

    assert names(world) == []
    assert world.status["rayCluster"]["avoidedNodes"] == ["bad"], "the running pods keep what they were created with"
    assert Reason.CLUSTER_RESTORED not in world.said


def test_progress_on_the_same_node_forgets_nothing() -> None:
    world = restart(gpu_fails(on_nodes(World().run(), critic="bad")))
    on_nodes(world, critic="bad").trainer_reports(step=4, checkpoint=saved(4)).settle()

    assert names(world) == [("bad", Reason.GPU_FAULT)]


def test_a_node_is_forgotten_after_six_hours() -> None:
    world = restart(gpu_fails(on_nodes(World().run(), critic="bad")))
    on_nodes(world, critic="bad").wait(6 * 3600 - 500).trainer_reports().settle()
    assert names(world) == [("bad", Reason.GPU_FAULT)]

    world.wait(500).trainer_reports().settle()

    assert names(world) == []


def test_the_same_node_again_begins_its_time_again() -> None:
    world = gpu_fails(on_nodes(World().run(), critic="bad"))
    first = world.status["avoidedNodes"][0]["time"]

    gpu_fails(on_nodes(restart(world), critic="bad"))

    [again] = world.status["avoidedNodes"]
    assert (again["attempt"], again["time"] > first) == (1, True)


def test_at_most_sixteen_nodes_are_known_and_the_oldest_is_forgotten() -> None:
    world = World(runPolicy={"backoffLimit": 100}).run()

    for number in range(17):
        restart(gpu_fails(on_nodes(world, critic=f"bad-{number:02}")))

    assert [name for name, _ in names(world)] == [f"bad-{number:02}" for number in range(1, 17)]


def test_a_job_that_has_failed_keeps_its_nodes_for_the_next_request() -> None:
    world = gpu_fails(on_nodes(World(runPolicy={"backoffLimit": 0}).run(), critic="bad"))
    assert world.status["phase"] == Phase.FAILED

    world.ask_for_a_retry().settle()

    assert affinities(world.made[-1]) == [avoiding("bad")] * 3
    assert world.pods_become(ready=True).see(ray=Ray()).settle().status["attempt"] == 1


def test_the_users_own_preferences_stay() -> None:
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    own = {"weight": 5, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}
    template = {"spec": {"affinity": {"nodeAffinity": {preferred: [own]}}}}
    pool = {"name": "actor", "gpusPerNode": 2, "nodes": 2, "spread": "Required", "podTemplate": template}
    world = World(pools=[pool, {"name": "critic", "gpusPerNode": 1}])
    world.settle().pods_become(ready=True)
    second = replace(next(pod for pod in world.observed.pods if pod.pool == "actor"), name="actor-2")
    world.see(pods=(*world.observed.pods, second), ray=Ray()).settle().wait(20).trainer_reports().settle()

    gpu_fails(on_nodes(world, actor="bad"), "actor").wait(10).settle()

    affinity = affinities(world.made[-1])[1]
    assert affinity["nodeAffinity"][preferred] == [*avoiding("bad")["nodeAffinity"][preferred], own]
    assert "podAntiAffinity" in affinity
