"""PPOJobs in a queue of a real Kueue, with KubeRay, on nodes that exist only in the API server: quota and priority."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from tests.integration.operator.conftest import FakeNodes, pool
from tests.integration.operator.test_suspension_and_layout import clusters, patch
from tools.cluster import kueue
from tools.cluster.layout import Layout

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), pytest.mark.usefixtures("queue", "volumes", "claim")]

GPU = "nvidia.com/gpu"
_QUEUE = "kueue.x-k8s.io/v1beta1"
_ENOUGH = "1000"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


@pytest.fixture(scope="module")
def _kueue(cluster: Any) -> Iterator[None]:
    """Kueue, while these tests run."""
    with kueue.installed(Layout.from_environment()):
        yield


@pytest.fixture(scope="module")
def queue(kubectl: Any, fake_nodes: FakeNodes, _kueue: None) -> Iterator[None]:
    """The queue `gpus` with a quota of three GPUs of kind h200. A job needs two."""
    name = kubectl.namespace
    quotas = [("cpu", _ENOUGH), ("memory", "1000Gi"), (GPU, "3")]
    flavor = {"name": name, "resources": [{"name": each, "nominalQuota": quota} for each, quota in quotas]}
    made = [
        {
            "apiVersion": _QUEUE,
            "kind": "ResourceFlavor",
            "metadata": {"name": name},
            "spec": {"nodeLabels": fake_nodes.kind("h200"), "tolerations": list(fake_nodes.tolerations)},
        },
        {
            "apiVersion": _QUEUE,
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": [each for each, _ in quotas], "flavors": [flavor]}],
            },
        },
        {"apiVersion": _QUEUE, "kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 1000},
        {
            "apiVersion": _QUEUE,
            "kind": "LocalQueue",
            "metadata": {"name": "gpus", "namespace": name},
            "spec": {"clusterQueue": name},
        },
    ]
    done = kubectl.apply(*made)
    assert done.returncode == 0, done.stderr
    yield
    kubectl("delete", "ppojobs", "--all")
    kubectl(
        "delete", "localqueues/gpus", f"clusterqueue/{name}", f"resourceflavor/{name}", "workloadpriorityclass/urgent"
    )


def queued_job(jobs: Any, **policy: Any) -> str:
    """Create a job that needs two of the queue's three GPUs, without node selectors."""
    pools = [pool(name, gpuResourceName=GPU) for name in ("actor", "critic")]
    name: str = jobs.create(pools=pools, runPolicy={"queueName": "gpus", **policy})
    return name


def job_without_queue(jobs: Any, **policy: Any) -> str:
    """Create such a job that names no queue."""
    pools = [pool(name, gpuResourceName=GPU) for name in ("actor", "critic")]
    name: str = jobs.create(pools=pools, runPolicy=policy)
    return name


@pytest.fixture
def default_queue(kubectl: Any, jobs: Any, queue: None) -> Iterator[None]:
    """The namespace's LocalQueue `default`, with the quota of `gpus`; Kueue knows it."""
    name = kubectl.namespace
    metadata = {"name": "default", "namespace": name}
    done = kubectl.apply(
        {"apiVersion": _QUEUE, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": name}}
    )
    assert done.returncode == 0, done.stderr
    jobs.wait_until(lambda: as_kueue_changes_it(kubectl)["metadata"].get("labels", {}).get(QUEUE_LABEL) == "default")
    yield
    kubectl("delete", "ppojobs", "--all")
    kubectl("delete", "localqueue/default")


@pytest.fixture
def groups_of_nodes(kubectl: Any, fake_nodes: FakeNodes, _kueue: None) -> Iterator[None]:
    """The queue `near`: eight GPUs on the nodes of kind h200, four on those of kind a100, which are far from them."""
    name, label = f"{kubectl.namespace}-near", {"ppojob.dev/test": kubectl.namespace}
    for kind in ("h200", "a100"):
        kubectl("label", "nodes", f"--selector=gpu-type={fake_nodes.kind(kind)['gpu-type']}", *labels(label))
    quotas = [("cpu", _ENOUGH), ("memory", "1000Gi"), (GPU, "12")]
    flavor = {"name": name, "resources": [{"name": each, "nominalQuota": quota} for each, quota in quotas]}
    done = kubectl.apply(
        {
            "apiVersion": _QUEUE,
            "kind": "Topology",
            "metadata": {"name": name},
            "spec": {"levels": [{"nodeLabel": "gpu-type"}]},
        },
        {
            "apiVersion": _QUEUE,
            "kind": "ResourceFlavor",
            "metadata": {"name": name},
            "spec": {"nodeLabels": label, "topologyName": name, "tolerations": list(fake_nodes.tolerations)},
        },
        {
            "apiVersion": _QUEUE,
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [{"coveredResources": [each for each, _ in quotas], "flavors": [flavor]}],
            },
        },
        {
            "apiVersion": _QUEUE,
            "kind": "LocalQueue",
            "metadata": {"name": "near", "namespace": kubectl.namespace},
            "spec": {"clusterQueue": name},
        },
    )
    assert done.returncode == 0, done.stderr
    yield
    kubectl("delete", "ppojobs", "--all")
    kubectl("delete", "localqueue/near", f"clusterqueue/{name}", f"resourceflavor/{name}", f"topology/{name}")


def labels(given: dict[str, str]) -> list[str]:
    """Return labels as kubectl's arguments."""
    return [f"{name}={value}" for name, value in given.items()]


@pytest.fixture
def manages_all(kubectl: Any, jobs: Any, queue: None) -> Iterator[None]:
    """Kueue suspends what names no queue, in this namespace."""
    selector = {"matchLabels": {"kubernetes.io/metadata.name": kubectl.namespace}}
    settings = {"manageJobsWithoutQueueName": True, "managedJobsNamespaceSelector": selector}
    with kueue.configured(Layout.from_environment(), **settings):
        jobs.wait_until(lambda: as_kueue_changes_it(kubectl)["spec"].get("suspend") is True)
        yield
        kubectl("delete", "ppojobs", "--all")


def as_kueue_changes_it(kubectl: Any) -> dict[str, Any]:
    """Return a Job as Kueue's webhook would let it be created."""
    probe: dict[str, Any] = kubectl.json("create", "job", "probe", "--image=nothing:1", "--dry-run=server")
    return probe


def wait_until_it_has_its_pods(jobs: Any, name: str) -> None:
    """Wait until the job is admitted and its pods are ready."""
    jobs.wait_for(name, Condition.ADMITTED, "True", Reason.ADMITTED)
    jobs.wait_for(name, Condition.POOLS_READY, "True", Reason.PODS_READY)


def test_the_second_job_waits_until_the_first_releases_its_quota(kubectl: Any, jobs: Any) -> None:
    first = queued_job(jobs)
    wait_until_it_has_its_pods(jobs, first)
    [cluster] = clusters(kubectl, first)
    template = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert template["nodeSelector"], "Kueue has written where the pods go, and the operator leaves it"

    second = queued_job(jobs, startupDeadlineSeconds=20)
    jobs.wait(second, lambda status: "insufficient unused quota" in str(status.get("conditions")), limit=240)
    message = jobs.wait_for(second, Condition.ADMITTED, "False", Reason.QUEUED)
    assert message.startswith("the job waits in the queue gpus: ")
    assert GPU in message
    assert kubectl("get", "ppojobs", second).splitlines()[1].split()[1] == Phase.QUEUED

    assert patch(kubectl, first, runPolicy={"suspend": True}).returncode == 0
    jobs.wait_for(first, Condition.SUSPENDED, "True", Reason.SUSPENDED)
    jobs.wait_for(second, Condition.ADMITTED, "True", Reason.ADMITTED)

    assert patch(kubectl, first, runPolicy={"suspend": False}).returncode == 0
    jobs.wait(first, lambda status: status["phase"] == Phase.QUEUED)
    kubectl("delete", "ppojob", second)
    wait_until_it_has_its_pods(jobs, first)
    assert jobs.status(first)["retries"]["total"] == 0


def test_an_urgent_job_pre_empts_another_which_is_admitted_again(kubectl: Any, jobs: Any) -> None:
    usual = queued_job(jobs)
    wait_until_it_has_its_pods(jobs, usual)
    before = jobs.status(usual)["rayCluster"]["name"]

    urgent = queued_job(jobs, queuePriorityClass="urgent")
    wait_until_it_has_its_pods(jobs, urgent)
    message = jobs.wait_for(usual, Condition.ADMITTED, "False", Reason.QUEUED)
    jobs.wait(usual, lambda status: "Preempted to accommodate" in str(status["conditions"]), limit=240)
    assert jobs.status(usual)["phase"] == Phase.QUEUED, message

    kubectl("delete", "ppojob", urgent)
    wait_until_it_has_its_pods(jobs, usual)
    status = jobs.status(usual)
    assert (status["rayCluster"]["name"], status["retries"]["total"]) == (before, 0)


def test_a_queue_that_does_not_exist_is_named(jobs: Any) -> None:
    name = jobs.create(runPolicy={"queueName": "nobodys"})

    jobs.wait(name, lambda status: "nobodys doesn't exist" in str(status.get("conditions")), limit=240)
    jobs.wait_for(name, Condition.ADMITTED, "False", Reason.QUEUED)


@pytest.mark.usefixtures("default_queue")
def test_a_job_without_a_queue_waits_runs_and_is_pre_empted_in_kueues_default_queue(kubectl: Any, jobs: Any) -> None:
    usual = job_without_queue(jobs)
    wait_until_it_has_its_pods(jobs, usual)
    before = jobs.status(usual)
    assert before["queueName"] == "default"

    second = job_without_queue(jobs, startupDeadlineSeconds=20)
    jobs.wait(second, lambda status: "insufficient unused quota" in str(status.get("conditions")), limit=240)
    assert jobs.status(second)["phase"] == Phase.QUEUED
    [cluster] = clusters(kubectl, second)
    assert cluster["metadata"]["labels"][QUEUE_LABEL] == "default"

    urgent = job_without_queue(jobs, queueName="default", queuePriorityClass="urgent")
    wait_until_it_has_its_pods(jobs, urgent)
    jobs.wait(usual, lambda status: "Preempted to accommodate" in str(status["conditions"]), limit=240)
    jobs.wait(usual, lambda status: status["phase"] == Phase.QUEUED)
    assert jobs.status(second)["phase"] == Phase.QUEUED, "its startup deadline has passed, and does not count"

    kubectl("delete", "ppojob", urgent, second)
    wait_until_it_has_its_pods(jobs, usual)
    status = jobs.status(usual)
    assert (status["rayCluster"]["name"], status["retries"]["total"]) == (before["rayCluster"]["name"], 0)
    found = kubectl.json("get", "events", "--field-selector", f"involvedObject.name={usual}")["items"]
    assert Reason.CLUSTER_SUSPENDED not in [event["reason"] for event in found]


@pytest.mark.usefixtures("manages_all")
def test_a_job_that_kueue_suspends_without_a_queue_runs_when_its_cluster_gets_one(kubectl: Any, jobs: Any) -> None:
    name = job_without_queue(jobs, startupDeadlineSeconds=20)
    message = jobs.wait_for(name, Condition.ADMITTED, "False", Reason.QUEUED)
    assert "manageJobsWithoutQueueName" in message
    [cluster] = clusters(kubectl, name)
    jobs.wait(name, lambda status: "LocalQueue" in str(status["conditions"]), limit=120)

    kubectl("label", "raycluster", cluster["metadata"]["name"], f"{QUEUE_LABEL}=gpus")

    wait_until_it_has_its_pods(jobs, name)
    assert jobs.status(name)["queueName"] == "gpus"


@pytest.mark.usefixtures("manages_all")
def test_the_job_that_fetches_waits_too_where_kueue_suspends_it_without_a_queue(kubectl: Any, jobs: Any) -> None:
    model = {"actor": {"path": "hf://organisation/model"}}
    name = jobs.create(model=model, runPolicy={"queueName": "gpus", "startupDeadlineSeconds": 5})
    jobs.wait(name, lambda status: f"kubectl label job {name}-fetch {QUEUE_LABEL}=QUEUE" in str(status))
    time.sleep(6)
    assert jobs.status(name)["phase"] == Phase.FETCHING, "the startup deadline has passed, and does not count"

    kubectl("label", "job", f"{name}-fetch", f"{QUEUE_LABEL}=gpus")

    # A pod on a node of KWOK ends at once.
    jobs.wait_for(name, Condition.SOURCES_FETCHED, "True", Reason.FETCHED)
    jobs.wait_for(name, Condition.ADMITTED, "True", Reason.ADMITTED)


@pytest.mark.usefixtures("groups_of_nodes")
def test_the_pods_of_a_pool_are_near_each_other_where_its_topology_says_so(
    kubectl: Any, jobs: Any, fake_nodes: FakeNodes
) -> None:
    def job(nodes: int, **topology: str) -> str:
        actor = pool("actor", nodes=nodes, gpusPerNode=1, gpuResourceName=GPU, topology=topology)
        name: str = jobs.create(pools=[actor], placement={"actor": "actor"}, runPolicy={"queueName": "near"})
        return name

    def kinds(name: str) -> set[str]:
        pods = kubectl.json("get", "pods", f"--selector=ppojob.dev/job={name},ppojob.dev/pool=actor")["items"]
        nodes = [kubectl.json("get", "node", each["spec"]["nodeName"]) for each in pods]
        return {node["metadata"]["labels"]["gpu-type"] for node in nodes}

    first = job(6, required="gpu-type")
    wait_until_it_has_its_pods(jobs, first)
    assert kinds(first) == {fake_nodes.kind("h200")["gpu-type"]}, "only these nodes have six GPUs"

    # Six GPUs are free, but two of them are far from the other four.
    near = job(6, required="gpu-type")
    jobs.wait(near, lambda status: "topology" in str(status.get("conditions")), limit=240)
    jobs.wait_for(near, Condition.ADMITTED, "False", Reason.QUEUED)
    kubectl("delete", "ppojob", near)
    anywhere = job(6, preferred="gpu-type")
    wait_until_it_has_its_pods(jobs, anywhere)
    assert kinds(anywhere) == {fake_nodes.kind(kind)["gpu-type"] for kind in ("h200", "a100")}
