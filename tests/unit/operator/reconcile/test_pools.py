"""Pools become ready, or the condition quotes the component that knows why not."""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.plan import Cluster, Pod, Trouble
from tests.unit.operator.reconcile.worlds import World, first_cluster, spec

GPU_POOLS = [
    {"name": "actor", "gpusPerNode": 2},
    {"name": "critic", "gpusPerNode": 8, "nodeSelector": {"gpu-type": "a100"}},
]
NO_GPUS = Trouble(Reason.INSUFFICIENT_GPUS, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
NO_NODE = Trouble(Reason.UNSCHEDULABLE, "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.")
NO_IMAGE = Trouble(Reason.IMAGE_PULL_FAILED, 'ImagePullBackOff: Back-off pulling image "trainer:1"')


def starting(**changes: object) -> World:
    """Return a job whose RayCluster was made and has its pods, none ready."""
    return World(**changes).settle().pods_become(ready=False)


def test_pods_that_start_are_waited_for() -> None:
    world = starting()

    world.settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    assert world.status["ready"] == "0/3"
    message = "the head pod is not ready; pool actor has 0 of 1 pods ready; pool critic has 0 of 1 pods ready"
    assert world.condition(Condition.POOLS_READY).message == message


def test_ready_counts_gpus_by_pool() -> None:
    world = starting().pods_become(ready=True, pool="actor")

    world.settle()

    assert world.status["ready"] == "2/3"
    assert [(pool["name"], pool["readyNodes"]) for pool in world.status["pools"]] == [("actor", 1), ("critic", 0)]


def test_workers_without_a_head_are_not_ready() -> None:
    world = starting().pods_become(ready=True).pods_become(ready=False, pool="head")

    world.settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    assert world.condition(Condition.POOLS_READY).message == "the head pod is not ready"


@pytest.mark.parametrize(
    ("trouble", "reason", "message"),
    [
        (
            NO_GPUS,
            Reason.INSUFFICIENT_GPUS,
            "pool critic requests 8 nvidia.com/gpu per node; 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        ),
        (
            NO_NODE,
            Reason.UNSCHEDULABLE,
            "pool critic requests 8 nvidia.com/gpu, 64 cpu and 512Gi memory per node on nodes with gpu-type=a100; "
            "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.",
        ),
        (
            NO_IMAGE,
            Reason.IMAGE_PULL_FAILED,
            'pool critic: ImagePullBackOff: Back-off pulling image "trainer:1"',
        ),
    ],
)
def test_a_pool_in_trouble_says_so_in_the_words_of_who_knows(trouble: Trouble, reason: str, message: str) -> None:
    world = starting(pools=GPU_POOLS).pods_become(ready=True).pods_become(ready=False, pool="critic", trouble=trouble)

    world.settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", reason)
    assert world.condition(Condition.POOLS_READY).message == message
    assert world.status["pools"][1]["message"] == message
    assert "message" not in world.status["pools"][0]
    assert world.said.count(reason) == 1


def test_devices_for_rdma_are_named_beside_the_gpus() -> None:
    rdma = {"resourceName": "rdma/hca", "count": 8}
    pools = [GPU_POOLS[0], {**GPU_POOLS[1], "network": {"rdma": rdma}}]
    lacking = Trouble(Reason.INSUFFICIENT_GPUS, "0/1 nodes are available: 1 Insufficient rdma/hca.")
    world = starting(pools=pools).pods_become(ready=True).pods_become(ready=False, pool="critic", trouble=lacking)

    world.settle()

    message = "pool critic requests 8 nvidia.com/gpu and 8 rdma/hca per node; 0/1 nodes are available: "
    assert world.condition(Condition.POOLS_READY).message == f"{message}1 Insufficient rdma/hca."


def test_a_lack_of_claimed_devices_names_the_claims_template() -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "one-h200"}]
    pools = [{"name": "actor", "gpusPerNode": 1, "gpuResourceName": "", "resourceClaims": claims}]
    world = World(pools=pools, placement={"actor": "actor"})
    lacking = Trouble(Reason.INSUFFICIENT_GPUS, "0/2 nodes are available: 2 cannot allocate all claims.")

    world.settle().pods_become(ready=False, pool="actor", trouble=lacking).look()

    message = world.condition(Condition.POOLS_READY).message
    assert message.startswith("pool actor requests a claim of template one-h200 per node; 0/2 nodes are available")


def test_of_several_troubles_the_one_that_waiting_helps_least_names_the_condition() -> None:
    world = starting(pools=GPU_POOLS)
    world.pods_become(ready=False, pool="actor", trouble=NO_GPUS)
    world.pods_become(ready=False, pool="critic", trouble=NO_IMAGE)

    world.settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.IMAGE_PULL_FAILED)


def test_while_pods_of_an_earlier_attempt_leave_the_new_ones_wait_for_their_room() -> None:
    world = starting(pools=GPU_POOLS).pods_become(ready=True).pods_become(ready=False, pool="critic", trouble=NO_GPUS)
    here = world.observed.pods
    world.see(pods=(*here, Pod("old-worker", "arithmetic-00000", "critic", is_deleting=True)))

    world.settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    message = world.condition(Condition.POOLS_READY).message
    assert message.startswith(
        "waits for the deletion of the pods of an earlier attempt (old-worker); pool critic requests 8"
    )
    assert NO_GPUS.message in message
    assert NO_GPUS.reason not in world.said

    world.see(pods=here).settle()
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.INSUFFICIENT_GPUS)


def test_an_image_that_cannot_be_pulled_waits_for_no_leaving_pod() -> None:
    world = starting().pods_become(ready=False, pool="critic", trouble=NO_IMAGE)
    world.see(pods=(*world.observed.pods, Pod("old-worker", "arithmetic-00000", "critic", is_deleting=True)))

    world.settle()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.IMAGE_PULL_FAILED)


def test_a_head_in_trouble_names_the_condition_too() -> None:
    world = starting().pods_become(ready=False, pool="head", trouble=NO_IMAGE)

    world.settle()

    assert world.condition(Condition.POOLS_READY).message == f"head: {NO_IMAGE.message}"


def test_a_problem_of_head_and_pools_is_reported_once() -> None:
    world = starting().pods_become(ready=False, pool="head", trouble=NO_IMAGE)
    world.pods_become(ready=False, pool="actor", trouble=NO_IMAGE).pods_become(
        ready=False, pool="critic", trouble=NO_IMAGE
    )

    world.settle()

    message = world.condition(Condition.POOLS_READY).message
    assert message == f"head, pool actor, pool critic: {NO_IMAGE.message}"
    assert [pool["message"] for pool in world.status["pools"]] == [
        f"pool actor: {NO_IMAGE.message}",
        f"pool critic: {NO_IMAGE.message}",
    ]


def test_what_the_scheduler_says_of_head_and_pool_is_reported_once_with_the_pools_requests() -> None:
    world = starting(pools=GPU_POOLS).pods_become(ready=False, pool="head", trouble=NO_NODE)
    world.pods_become(ready=False, pool="actor", trouble=NO_GPUS).pods_become(
        ready=False, pool="critic", trouble=NO_NODE
    )

    world.settle()

    message = world.condition(Condition.POOLS_READY).message
    assert message.startswith("head; pool critic requests 8 nvidia.com/gpu")
    assert message.count(NO_NODE.message) == 1
    assert message.endswith(f"pool actor requests 2 nvidia.com/gpu per node; {NO_GPUS.message}")


def test_a_cluster_that_kuberay_cannot_fill_says_so_in_its_words() -> None:
    words = 'pods "x" is forbidden: exceeded quota: gpus'
    world = World().settle().see(clusters=(Cluster(first_cluster(), problem=words),))

    plan = world.look()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.PODS_REFUSED)
    assert words in world.condition(Condition.POOLS_READY).message
    assert [manifest["kind"] for manifest in plan.apply] == ["ServiceAccount", "Secret"]


def test_pods_that_a_quota_can_never_allow_are_named_with_their_field() -> None:
    world = World().settle()
    amounts = "requested: requests.memory=8Gi, used: requests.memory=0, limited: requests.memory=1Gi"
    problem = f"FailedCreateHeadPod is forbidden: exceeded quota: team, {amounts}"
    world.see(clusters=(Cluster(first_cluster(), problem=problem, spec=world.made[-1]["spec"]),)).look()

    message = world.condition(Condition.POOLS_READY).message

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.PODS_REFUSED)
    assert message.startswith("the pods can never run: spec.head.resources.memory: 1 pod requests requests.memory=8Gi")
    assert message.endswith(problem)


def test_a_cluster_that_the_api_server_refuses_says_so() -> None:
    world = World().see(last_error=".spec.workerGroupSpecs[0].template.spec.foo: field not declared in schema")

    world.look()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.CLUSTER_REFUSED)
    assert "field not declared" in world.condition(Condition.POOLS_READY).message


def test_a_refused_cluster_names_the_users_item_by_its_place_in_the_users_template() -> None:
    world = World(head={"podTemplate": {"spec": {"containers": [{"name": "logs"}]}}})
    world.see(last_error="Invalid; see spec.head.podTemplate.spec.containers[1].image of the PPOJob").look()

    assert "see spec.head.podTemplate.spec.containers[0].image of" in world.condition(Condition.POOLS_READY).message


def test_a_suspended_cluster_says_so() -> None:
    world = World().settle().see(clusters=(Cluster(first_cluster(), is_suspended=True),))

    world.look()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.CLUSTER_SUSPENDED)


def test_a_cluster_of_multikueue_says_that_its_pods_run_elsewhere() -> None:
    elsewhere = Cluster(first_cluster(), is_suspended=True, managed_by="kueue.x-k8s.io/multikueue")
    world = World(runPolicy={"queueName": "gpus"}).settle().see(clusters=(elsewhere,))

    world.look()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.WAITING_FOR_PODS)
    assert "managed by kueue.x-k8s.io/multikueue" in world.condition(Condition.POOLS_READY).message


def test_pods_of_another_cluster_do_not_count() -> None:
    world = starting().pods_become(ready=True)
    world.status["rayCluster"]["name"] = "arithmetic-00000"

    world.look()

    assert world.status["ready"] == "0/3"


def test_a_pool_of_many_nodes_is_ready_with_the_last_one() -> None:
    pools = [{"name": "actor", "nodes": 2, "gpusPerNode": 4}, {"name": "critic", "gpusPerNode": 1}]
    world = starting(pools=pools).pods_become(ready=True)
    world.settle()
    assert world.status["ready"] == "5/9"

    second = world.observed.pods[1]
    world.see(pods=(*world.observed.pods, type(second)("another", second.cluster, "actor", True))).settle()
    assert world.verdict(Condition.POOLS_READY) == ("True", Reason.PODS_READY)


def test_the_spec_of_the_tests_is_good() -> None:
    assert World(**spec()).settle().verdict(Condition.ACCEPTED)[0] == "True"
