"""From raw objects to views: which of a pod's many messages says why it does not run, and what KubeRay means."""

from datetime import UTC, datetime
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_operator.plan import Pod, Trouble, Workload
from ppojob_operator.reading import read_claim, read_cluster, read_job, read_workload
from ppojob_operator.reading_pods import read_pod
from tests.unit.operator.reconcile.worlds import World

# As KubeRay 1.6.2 writes it; the pod's name is another one at each of its tries.
REFUSED = 'FailedCreateHeadPod\npods "q-head-rs8cg" is forbidden: exceeded quota: none, requested: pods=1'


RAY = "ray-worker"
OOM = Trouble(
    Reason.OUT_OF_MEMORY, "container ray-worker exceeded its memory limit of 64Gi and was terminated", RAY, 137
)


def pod(status: dict[str, Any], gpu: str = "nvidia.com/gpu") -> Pod:
    """Return the view of a worker pod that asks for GPUs."""
    limits = {"memory": "64Gi", **({gpu: "2"} if gpu else {})}
    labels = {"ray.io/cluster": "c", "ppojob.dev/pool": "actor"}
    return read_pod(
        {
            "metadata": {"name": "p", "labels": labels, "creationTimestamp": "2026-03-01T12:00:00Z"},
            "spec": {"containers": [{"name": "ray-worker", "resources": {"limits": limits}}]},
            "status": status,
        }
    )


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """Return the status of a pod whose container waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "ray-worker", "state": state}]}


def ended(reason: str, code: int, message: str = "") -> dict[str, Any]:
    """Return the status of a pod whose container ended."""
    state = {"terminated": {"reason": reason, "exitCode": code, "message": message}}
    return {"phase": "Failed", "containerStatuses": [{"name": "ray-worker", "state": state}]}


def unscheduled(message: str) -> dict[str, Any]:
    """Return the status of a pod that has no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def test_a_running_pod_is_ready_with_its_condition() -> None:
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}

    created = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert pod(status) == Pod("p", "c", "actor", is_ready=True, address="10.0.0.1", created=created)


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({"phase": "Pending"}, None),
        (waiting("ContainerCreating"), None),
        (waiting("PodInitializing"), None),
        (
            unscheduled("0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 others."),
            Trouble(Reason.INSUFFICIENT_GPUS, "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 others."),
        ),
        (
            unscheduled("0/4 nodes are available: 4 cannot allocate all claims."),
            Trouble(Reason.INSUFFICIENT_GPUS, "0/4 nodes are available: 4 cannot allocate all claims."),
        ),
        (
            unscheduled("0/1 nodes are available: 1 Insufficient cpu."),
            Trouble(Reason.UNSCHEDULABLE, "0/1 nodes are available: 1 Insufficient cpu."),
        ),
        (
            waiting("ErrImagePull", "failed to pull: not found"),
            Trouble(Reason.IMAGE_PULL_FAILED, "ErrImagePull: failed to pull: not found", RAY),
        ),
        (waiting("InvalidImageName"), Trouble(Reason.IMAGE_PULL_FAILED, "InvalidImageName", RAY)),
        (
            waiting("CreateContainerConfigError", 'secret "hf" not found'),
            Trouble(Reason.POD_FAILED, 'container ray-worker: CreateContainerConfigError: secret "hf" not found', RAY),
        ),
        (ended("OOMKilled", 137), OOM),
        (
            ended("Error", 1, "ray: command not found\n"),
            Trouble(Reason.POD_FAILED, f"container {RAY} ended: Error, exit code 1: ray: command not found", RAY, 1),
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            Trouble(Reason.POD_FAILED, "Evicted: The node was low on resource: memory."),
        ),
        ({"phase": "Failed"}, Trouble(Reason.POD_FAILED, "the pod failed")),
    ],
)  # fmt: skip
def test_a_pod_that_does_not_run_says_why(status: dict[str, Any], trouble: Trouble | None) -> None:
    found = pod(status)

    assert not found.is_ready
    assert found.trouble == trouble


def test_a_pod_whose_claim_has_no_volume_says_where_the_reason_is() -> None:
    words = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    names = ("data", "models", "data")
    volumes = [{"persistentVolumeClaim": {"claimName": name}} for name in names]
    spec = {"containers": [], "volumes": [{"emptyDir": {}}, *volumes]}

    found = read_pod({"metadata": {"name": "p"}, "spec": spec, "status": unscheduled(words)})

    remedy = "; `kubectl describe pvc data models` says why, for example because no StorageClass is the default one"
    assert found.trouble == Trouble(Reason.UNSCHEDULABLE, f"{words}{remedy}")


def disrupted(why: str, message: str = "", **status: Any) -> dict[str, Any]:
    """Return the status of a pod that somebody takes away."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": why, "message": message}
    return {"phase": "Running", "conditions": [condition], **status}


@pytest.mark.parametrize(
    ("status", "disruption"),
    [
        (
            disrupted("PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority pod"),
            Trouble(
                Reason.PREEMPTED,
                "PreemptionByScheduler: default-scheduler: preempting to accommodate a higher priority pod",
            ),
        ),
        (disrupted("EvictionByEvictionAPI"), Trouble(Reason.PREEMPTED, "EvictionByEvictionAPI")),
        (disrupted("TerminationByKubelet", reason="Evicted"), Trouble(Reason.PREEMPTED, "TerminationByKubelet")),
        (disrupted("TerminationByKubelet", reason="Terminated"), Trouble(Reason.NODE_LOST, "TerminationByKubelet")),
        (disrupted("DeletionByTaintManager"), Trouble(Reason.NODE_LOST, "DeletionByTaintManager")),
        (disrupted("DeletionByPodGC"), Trouble(Reason.NODE_LOST, "DeletionByPodGC")),
        ({"conditions": [{"type": "DisruptionTarget", "status": "False", "reason": "PreemptionByScheduler"}]}, None),
    ],
)
def test_who_takes_a_pod_away_is_in_its_conditions(status: dict[str, Any], disruption: Trouble | None) -> None:
    found = pod(status)

    assert found.disruption == disruption
    assert found.trouble is None, "its containers may run until the trainer has stopped gracefully"


@pytest.mark.parametrize(
    ("ready", "containers", "is_lost"),
    [
        ({"status": "False"}, "True", True),  # As the controller of nodes writes it.
        ({"status": "False", "reason": "ContainersNotReady"}, "False", False),
        ({"status": "False", "reason": "ReadinessGatesNotReady"}, "True", False),
        ({"status": "True"}, "True", False),
    ],
)
def test_a_pod_whose_node_does_not_answer_is_known_by_its_containers(
    ready: dict[str, str], containers: str, is_lost: bool
) -> None:
    conditions = [{"type": "Ready", **ready}, {"type": "ContainersReady", "status": containers}]

    found = pod({"phase": "Running", "conditions": conditions}).disruption

    assert (found == Trouble(Reason.NODE_LOST, "its node does not respond")) is is_lost


def test_a_gpu_may_have_another_name() -> None:
    found = pod(unscheduled("0/1 nodes are available: 1 Insufficient amd.com/gpu."), gpu="amd.com/gpu")

    assert found.trouble is not None
    assert found.trouble.reason == Reason.INSUFFICIENT_GPUS


def test_an_init_container_may_be_the_one_in_trouble() -> None:
    status = waiting("ErrImagePull", "not found")
    status["initContainerStatuses"] = status.pop("containerStatuses")

    assert pod(status).trouble == Trouble(Reason.IMAGE_PULL_FAILED, "ErrImagePull: not found", RAY)


def test_a_container_beyond_its_memory_names_the_pods_trouble_before_another_that_ended() -> None:
    status = ended("OOMKilled", 137)
    first = {"name": "logger", "state": {"terminated": {"reason": "Error", "exitCode": 1}}}
    status["containerStatuses"].insert(0, first)

    found = pod(status)

    assert found.trouble == found.out_of_memory == OOM


@pytest.mark.parametrize(("name", "is_told"), [("ray-worker", True), ("logger", False)])
def test_a_container_of_rays_that_was_killed_for_memory_and_runs_again_is_remembered(name: str, is_told: bool) -> None:
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    container = {"name": name, "state": {"running": {}}, "lastState": killed, "restartCount": 1}

    found = pod({"phase": "Running", "containerStatuses": [container]})

    assert found.trouble is None, "it runs"
    assert found.out_of_memory == (OOM if is_told else None)


def test_a_pod_without_a_pool_is_the_head() -> None:
    raw = {"metadata": {"name": "h", "labels": {"ray.io/cluster": "c"}, "deletionTimestamp": "now"}, "spec": {}}

    found = read_pod(raw)

    assert found.pool is None
    assert found.is_deleting


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({}, ""),
        ({"state": "ready"}, ""),
        ({"state": "failed", "reason": "invalid spec"}, "invalid spec"),
        ({"state": "ready", "reason": "an old one"}, ""),
        (
            {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": REFUSED}]},
            "FailedCreateHeadPod is forbidden: exceeded quota: none, requested: pods=1",
        ),
        ({"conditions": [{"type": "ReplicaFailure", "status": "False", "message": REFUSED}]}, ""),
    ],
)
def test_what_kuberay_says_of_a_cluster(status: dict[str, Any], problem: str) -> None:
    assert read_cluster({"metadata": {"name": "c"}, "status": status}).problem == problem


@pytest.mark.parametrize(
    "raw",
    [
        {"spec": {"suspend": True}},
        {"status": {"conditions": [{"type": "RayClusterSuspended", "status": "True"}]}},
    ],
)
def test_a_suspended_cluster_is_known_in_all_its_forms(raw: dict[str, Any]) -> None:
    assert read_cluster({"metadata": {"name": "c"}, **raw}).is_suspended


def test_a_cluster_that_is_being_resumed_is_not_suspended() -> None:
    conditions = [{"type": "RayClusterSuspended", "status": "False"}]
    raw = {"spec": {"suspend": False}, "status": {"state": "suspended", "conditions": conditions}}

    assert not read_cluster({"metadata": {"name": "c"}, **raw}).is_suspended


def test_a_cluster_with_a_head_names_its_service() -> None:
    raw = {"metadata": {"name": "c", "deletionTimestamp": "now"}, "status": {"head": {"serviceName": "c-head-svc"}}}

    found = read_cluster(raw)

    assert (found.head_service, found.is_deleting, found.is_suspended) == ("c-head-svc", True, False)


@pytest.mark.parametrize(
    ("conditions", "waits_for", "eviction"),
    [
        ([], "", ""),
        ([{"type": "QuotaReserved", "status": "False", "message": "no room"}], "no room", ""),
        ([{"type": "QuotaReserved", "status": "True", "message": "reserved"}], "", ""),
        ([{"type": "Evicted", "status": "True", "message": "preempted"}], "", "preempted"),
        ([{"type": "Evicted", "status": "False", "message": "previously: preempted"}], "", ""),
    ],
)
def test_what_kueue_says_of_a_cluster(conditions: list[dict[str, str]], waits_for: str, eviction: str) -> None:
    metadata = {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": "u"}}

    assert read_workload({"metadata": metadata, "status": {"conditions": conditions}}) == Workload(
        "u", waits_for, eviction
    )


def test_a_claim_without_a_phase_is_pending() -> None:
    assert read_claim({"metadata": {"name": "data"}}).phase == "Pending"


def test_a_status_that_a_newer_operator_wrote_is_read_and_its_own_new_fields_are_kept() -> None:
    world = World().run()
    world.status |= {"verdict": {"word": "new"}, "measured": [1]}
    world.status["rayCluster"] = {**world.status["rayCluster"], "zone": "a"}
    by_operator = {"f:phase": {}, "f:verdict": {"f:word": {}}, "f:rayCluster": {}}
    managers = [
        {"manager": "ppojob-operator", "subresource": "status", "fieldsV1": {"f:status": by_operator}},
        {"manager": "ppojob-operator", "fieldsV1": {"f:metadata": {}}},
        {"manager": "ppojob-progress", "subresource": "status", "fieldsV1": {"f:status": {"f:measured": {}}}},
    ]

    job = read_job({**world.raw, "metadata": {**world.raw["metadata"], "managedFields": managers}})

    assert job.unknown == {"verdict": {"word": "new"}}
    assert job.status.phase == "Running"
    assert read_job(world.raw).unknown == {}, "nobody says that it is the operator's"
