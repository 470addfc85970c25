"""Devices by claims and slices, and what a pod template adds: the real scheduler places pods on nodes of KWOK's."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.test_placement import fake_head, fake_pool
from tools.cluster.kwok import add_nodes, remove_nodes
from tools.cluster.layout import Layout

pytestmark = pytest.mark.usefixtures("volumes", "claim")

DEVICES_OF_A_NODE = 2
MIG = "nvidia.com/mig-3g.71gb"


@dataclass(frozen=True)
class Classes:
    """Objects of the whole cluster that this module made, by kind; all have the same name."""

    name: str

    @property
    def driver(self) -> str:
        """The driver whose devices the h200 nodes have."""
        return f"{self.name}.ppojob.test"

    def template(self, name: str, count: int) -> dict[str, Any]:
        """Return a ResourceClaimTemplate for so many devices."""
        exactly = {"deviceClassName": self.name, "count": count}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": name},
            "spec": {"spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}},
        }


@pytest.fixture(scope="module")
def classes(kubectl: Any, fake_nodes: Any) -> Iterator[Classes]:
    """A DeviceClass with two devices on each h200 node, a PriorityClass and a RuntimeClass."""
    made = Classes(f"c{uuid.uuid4().hex[:6]}")
    selector = {"cel": {"expression": f"device.driver == '{made.driver}'"}}
    slices = [resource_slice(made, f"{fake_nodes.prefix}-h200-{index}") for index in range(2)]
    done = kubectl.apply(
        cluster_wide("resource.k8s.io/v1", "DeviceClass", made.name, spec={"selectors": [selector]}),
        cluster_wide("scheduling.k8s.io/v1", "PriorityClass", made.name, value=1234),
        cluster_wide("node.k8s.io/v1", "RuntimeClass", made.name, handler="runc"),
        *slices,
    )
    assert done.returncode == 0, done.stderr
    yield made
    kinds = ("deviceclass", "priorityclass", "runtimeclass")
    names = [f"{kind}/{made.name}" for kind in kinds] + [f"resourceslice/{each['metadata']['name']}" for each in slices]
    kubectl("delete", *names, "--wait=false")


def cluster_wide(version: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


def resource_slice(classes: Classes, node: str) -> dict[str, Any]:
    """Return what a DRA driver would publish of a node."""
    devices = [{"name": f"gpu-{index}"} for index in range(DEVICES_OF_A_NODE)]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": classes.driver, "nodeName": node, "pool": pool, "devices": devices}
    return cluster_wide("resource.k8s.io/v1", "ResourceSlice", f"{classes.name}-{node}", spec=spec)


def pods_of(kubectl: Any, name: str, pool: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.json(
        "get", "pods", "--selector", f"ppojob.dev/job={name},ppojob.dev/pool={pool}"
    )["items"]
    return found


def claimed(fake_nodes: Any, template: str, **fields: Any) -> dict[str, Any]:
    """Return the actor's pool, whose devices come by a claim."""
    claims = [{"name": "gpus", "resourceClaimTemplateName": template}]
    given = {"gpusPerNode": DEVICES_OF_A_NODE, "gpuResourceName": "", "resourceClaims": claims}
    return fake_pool(fake_nodes, "actor", "h200", **{**given, **fields})


def test_each_pod_gets_a_separate_claim_with_the_devices_of_its_node(
    kubectl: Any, jobs: Any, fake_nodes: Any, classes: Classes
) -> None:
    assert kubectl.apply(classes.template("all-of-a-node", DEVICES_OF_A_NODE)).returncode == 0
    pools = [claimed(fake_nodes, "all-of-a-node", nodes=2)]
    name = jobs.create(device="CUDA", pools=pools, placement={"actor": "actor"}, head=fake_head(fake_nodes))

    jobs.wait_for(name, Condition.POOLS_READY, "True", Reason.PODS_READY)

    node_of = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods_of(kubectl, name, "actor")}
    claims = kubectl.json("get", "resourceclaims")["items"]
    allocated = {
        claim["metadata"]["ownerReferences"][0]["name"]: [
            (device["pool"], device["device"]) for device in claim["status"]["allocation"]["devices"]["results"]
        ]
        for claim in claims
    }
    assert sorted(node_of.values()) == [f"{fake_nodes.prefix}-h200-{index}" for index in range(2)]
    assert {pod: sorted(devices) for pod, devices in allocated.items()} == {
        pod: [(node, "gpu-0"), (node, "gpu-1")] for pod, node in node_of.items()
    }
    assert jobs.status(name)["ready"] == "4/4"


def test_devices_that_no_node_has_left_are_said_in_the_schedulers_words(
    kubectl: Any, jobs: Any, fake_nodes: Any, classes: Classes
) -> None:
    assert kubectl.apply(classes.template("more-than-a-node", DEVICES_OF_A_NODE + 1)).returncode == 0
    pools = [claimed(fake_nodes, "more-than-a-node", gpusPerNode=DEVICES_OF_A_NODE + 1)]
    name = jobs.create(device="CUDA", pools=pools, placement={"actor": "actor"}, head=fake_head(fake_nodes))

    message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.INSUFFICIENT_GPUS)

    assert message.startswith("pool actor requests a claim of template more-than-a-node per node; 0/")
    assert "cannot allocate all claims" in message


def test_slices_of_one_gpu_are_given_to_several_pods(kubectl: Any, jobs: Any, fake_nodes: Any) -> None:
    prefix = f"{fake_nodes.prefix}-mig"
    add_nodes(Layout.from_environment(), 1, prefix=prefix, labels=fake_nodes.kind("mig"), gpus=4, resource=MIG)
    try:
        pools = [fake_pool(fake_nodes, "actor", "mig", nodes=3, gpusPerNode=1, gpuResourceName=MIG)]
        name = jobs.create(device="CUDA", pools=pools, placement={"actor": "actor"}, head=fake_head(fake_nodes))
        jobs.wait_for(name, Condition.POOLS_READY, "True", Reason.PODS_READY)

        assert [pod["spec"]["nodeName"] for pod in pods_of(kubectl, name, "actor")] == [f"{prefix}-0"] * 3
    finally:
        remove_nodes(Layout.from_environment(), prefix=prefix)


def test_a_pod_template_and_a_service_account_reach_the_pods(
    kubectl: Any, jobs: Any, fake_nodes: Any, classes: Classes
) -> None:
    kubectl("create", "serviceaccount", "bucket-reader")
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    neighbours = {"labelSelector": {"matchLabels": {"noisy": "yes"}}, "topologyKey": "kubernetes.io/hostname"}
    template = {
        "metadata": {"labels": {"team": "rl"}},
        "spec": {
            "priorityClassName": classes.name,
            "runtimeClassName": classes.name,
            "affinity": {"podAntiAffinity": {required: [neighbours]}},
            "containers": [
                {"name": "watcher", "image": "watcher:1", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}
            ],
            "volumes": [{"name": "cache", "emptyDir": {}}],
        },
    }
    pools = [fake_pool(fake_nodes, "actor", "h200", nodes=2, gpusPerNode=1, spread="Required", podTemplate=template)]
    name = jobs.create(
        device="CUDA",
        pools=pools,
        placement={"actor": "actor"},
        head=fake_head(fake_nodes),
        serviceAccountName="bucket-reader",
    )

    jobs.wait_for(name, Condition.POOLS_READY, "True", Reason.PODS_READY)
    pods = pods_of(kubectl, name, "actor")

    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2, "spread: Required counts beside the user's affinity"
    for pod in pods:
        spec = pod["spec"]
        assert (spec["priority"], spec["runtimeClassName"]) == (1234, classes.name)
        assert spec["serviceAccountName"] == "bucket-reader"
        assert [container["name"] for container in spec["containers"]] == ["ray-worker", "watcher"]
        assert len(spec["affinity"]["podAntiAffinity"][required]) == 2
        assert pod["metadata"]["labels"]["team"] == "rl"


def test_a_service_account_that_is_not_there_is_said(jobs: Any, fake_nodes: Any) -> None:
    pools = [fake_pool(fake_nodes, "actor", "h200", gpusPerNode=1)]
    name = jobs.create(
        device="CUDA",
        pools=pools,
        placement={"actor": "actor"},
        head=fake_head(fake_nodes),
        serviceAccountName="no-such-account",
    )

    assert "no-such-account" in jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.PODS_REFUSED)
