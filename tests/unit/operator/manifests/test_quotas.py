"""What a quota can never allow is named with its field; what may be free later is not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests.quotas import Group, excess, excess_of_cluster, groups_of
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.manifests.trials import trials
from ppojob_operator.plan import JobKey, Manifest

POOLS = [
    {"name": "actor", "gpusPerNode": 8, "nodes": 2, "resourcesPerGPU": {"cpu": "4", "memory": "32Gi"}},
    {"name": "critic", "gpusPerNode": 4, "resourcesPerGPU": {"cpu": "2", "memory": "16Gi"}},
]


@pytest.fixture
def cluster(make_spec: Callable[..., PPOJobSpec]) -> Manifest:
    """Return a RayCluster of two pools: 2 x 8 and 1 x 4 GPUs, 2 x 256Gi and 64Gi."""
    return ray_cluster(make_spec(pools=POOLS), JobKey("ns", "job"), "uid-1", "job-next")


def refused(requested: str, used: str, limited: str, kind: str = 'pods "job-next-x7k2p"') -> str:
    """Return the API server's message about a quota."""
    return f"{kind} is forbidden: exceeded quota: team, requested: {requested}, used: {used}, limited: {limited}"


HEAD, ACTOR, CRITIC = 1, 2, 3
EXCESSES = [
    (CRITIC, "limits.memory=64Gi", "limits.memory=0", "limits.memory=32Gi",
     "spec.pools[1].resourcesPerGPU.memory: 1 pod requests limits.memory=64Gi, and quota team allows 32Gi in all: "
     "lower this field, or raise the quota"),
    (CRITIC, "requests.nvidia.com/gpu=4", "requests.nvidia.com/gpu=8", "requests.nvidia.com/gpu=2",
     "spec.pools[1].gpusPerNode: 1 pod requests requests.nvidia.com/gpu=4, and quota team allows 2 in all: "
     "lower this field, or raise the quota"),
    (ACTOR, "requests.nvidia.com/gpu=8", "requests.nvidia.com/gpu=4", "requests.nvidia.com/gpu=10",
     "spec.pools[0].gpusPerNode: 2 pods request requests.nvidia.com/gpu=8 each, and quota team allows 10 in all: "
     "lower this field, or raise the quota"),
    (ACTOR, "cpu=32", "cpu=0", "cpu=31500m",
     "spec.pools[0].resourcesPerGPU.cpu: 2 pods request cpu=32 each, and quota team allows 31500m in all: "
     "lower this field, or raise the quota"),
    (ACTOR, "pods=1", "pods=1", "pods=1",
     "spec.pools[0].nodes: 2 pods request pods=1 each, and quota team allows 1 in all: "
     "lower this field, or raise the quota"),
    (HEAD, "requests.memory=8Gi", "requests.memory=0", "requests.memory=4096Mi",
     "spec.head.resources.memory: 1 pod requests requests.memory=8Gi, and quota team allows 4096Mi in all: "
     "lower this field, or raise the quota"),
    (HEAD, "pods=1", "pods=0", "pods=0",
     "metadata.namespace: 1 pod requests pods=1, and quota team allows 0 in all: "
     "create the job in another namespace, or raise the quota"),
    (HEAD, "requests.ephemeral-storage=2Gi", "requests.ephemeral-storage=0", "requests.ephemeral-storage=1Gi",
     "spec.head.podTemplate: 1 pod requests requests.ephemeral-storage=2Gi, and quota team allows 1Gi in all: "
     "lower this field, or raise the quota"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "requested", "used", "limited", "expected"), EXCESSES)
def test_pods_that_ask_for_more_than_a_quota_allows_in_all_are_refused(
    cluster: Manifest, place: int, requested: str, used: str, limited: str, expected: str
) -> None:
    assert trials(cluster)[place].refusal(f"403 {refused(requested, used, limited)}") == expected


@pytest.mark.parametrize(
    ("place", "requested", "used", "limited"),
    [
        (CRITIC, "limits.memory=64Gi", "limits.memory=64Gi", "limits.memory=64Gi"),
        (CRITIC, "limits.memory=64Gi", "limits.memory=1Gi", "limits.memory=65536Mi"),
        (ACTOR, "requests.nvidia.com/gpu=8", "requests.nvidia.com/gpu=12", "requests.nvidia.com/gpu=16"),
        (ACTOR, "cpu=32,pods=1", "cpu=64,pods=9", "cpu=64,pods=9"),
        (HEAD, "requests.memory=8Gi", "requests.memory=1", "requests.memory=8Gi"),
        # Spellings that this operator does not read.
        (CRITIC, "limits.memory=64Gi", "limits.memory=0", "limits.memory=1e3"),
        (CRITIC, "limits.memory=64Ei", "limits.memory=0", "limits.memory=1"),
        (CRITIC, "", "", ""),
    ],
)
def test_a_quota_that_is_used_up_now_is_no_refusal(
    cluster: Manifest, place: int, requested: str, used: str, limited: str
) -> None:
    assert trials(cluster)[place].refusal(f"403 {refused(requested, used, limited)}") == ""


def test_only_what_exceeds_the_quota_is_named(cluster: Manifest) -> None:
    words = refused("limits.memory=64Gi,pods=1", "limits.memory=0,pods=5", "limits.memory=1Gi,pods=5")

    assert "pods=1" not in trials(cluster)[CRITIC].refusal(words)
    assert "spec.pools[1].resourcesPerGPU.memory: " in trials(cluster)[CRITIC].refusal(words)


def test_a_namespace_without_rayclusters_refuses_every_job(cluster: Manifest) -> None:
    of_clusters = "count/rayclusters.ray.io"
    none = refused(f"{of_clusters}=1", f"{of_clusters}=0", f"{of_clusters}=0", 'rayclusters.ray.io "job-next"')
    used_up = refused(f"{of_clusters}=1", f"{of_clusters}=1", f"{of_clusters}=1", 'rayclusters.ray.io "job-next"')

    assert trials(cluster)[0].refusal(none) == (
        f"metadata.namespace: 1 object requests {of_clusters}=1, and quota team allows 0 in all: "
        "create the job in another namespace, or raise the quota"
    )
    assert trials(cluster)[0].refusal(used_up) == ""


def test_a_pool_without_which_the_job_runs_is_never_refused() -> None:
    group = Group("spec.pools[1]", 0, {})

    assert excess(refused("cpu=8", "cpu=0", "cpu=4"), [group]) == ""


def test_kuberays_words_about_a_head_are_about_the_head(cluster: Manifest) -> None:
    words = f"FailedCreateHeadPod {refused('limits.memory=8Gi', 'limits.memory=0', 'limits.memory=1Gi')}"

    assert excess_of_cluster(words, cluster["spec"]).startswith("spec.head.resources.memory: ")


@pytest.mark.parametrize(
    ("requested", "limited", "path"),
    [
        ("limits.memory=256Gi", "limits.memory=1Gi", "spec.pools[0].resourcesPerGPU.memory"),
        ("limits.memory=64Gi", "limits.memory=1Gi", "spec.pools[1].resourcesPerGPU.memory"),
        ("requests.nvidia.com/gpu=4", "requests.nvidia.com/gpu=2", "spec.pools[1].gpusPerNode"),
        ("limits.memory=999Gi", "limits.memory=1Gi", "spec.pools"),
    ],
)
def test_kuberays_words_about_a_worker_are_about_the_pool_that_asks_for_as_much(
    cluster: Manifest, requested: str, limited: str, path: str
) -> None:
    words = f"FailedCreateWorkerPod {refused(requested, 'limits.memory=0', limited)}"

    assert excess_of_cluster(words, cluster["spec"]).startswith(f"{path}: ")


def test_kuberays_words_that_may_be_about_a_pool_that_can_run_say_nothing(cluster: Manifest) -> None:
    """The quota may be about the other pool alone, by its priority class."""
    words = f"FailedCreateWorkerPod {refused('pods=1', 'pods=1', 'pods=1')}"
    spec = copy.deepcopy(cluster["spec"])

    # Two pods of the actor's pool, and one of the critic's.
    assert excess_of_cluster(words, spec) == ""
    for group in spec["workerGroupSpecs"]:
        group["minReplicas"] = 2
    assert excess_of_cluster(words, spec).startswith("spec.pools[0].nodes: ")


def test_the_requests_of_a_sidecar_count_towards_its_pod() -> None:
    containers: list[dict[str, Any]] = [
        {"name": "ray-worker", "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "4Gi"}}},
        {"name": "sidecar", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}},
    ]
    spec = {"workerGroupSpecs": [{"minReplicas": 1, "template": {"spec": {"containers": containers}}}]}
    [_, group] = groups_of(spec)

    assert [int(amount) for amount in group.amounts("requests.cpu")] == [4, 5]
    assert [int(amount) for amount in group.amounts("cpu")] == [4, 5]
    assert [int(amount) for amount in group.amounts("limits.memory")] == [4 * 2**30, 5 * 2**30]


def test_a_limit_range_is_named_with_the_field_that_exceeds_it(cluster: Manifest) -> None:
    words = 'pods "x" is forbidden: maximum memory usage per Container is 16Gi, but limit is 64Gi'
    of_a_sidecar = 'pods "x" is forbidden: maximum memory usage per Container is 16Gi, but limit is 17Gi'

    assert trials(cluster)[CRITIC].refusal(words) == (
        "spec.pools[1].resourcesPerGPU.memory: maximum memory usage per Container is 16Gi, but limit is 64Gi: "
        "change it, or the LimitRange of the namespace"
    )
    assert trials(cluster)[CRITIC].refusal(of_a_sidecar).startswith("spec.pools[1].podTemplate: maximum memory")
