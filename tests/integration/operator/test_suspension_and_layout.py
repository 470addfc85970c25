"""Suspension and another layout, on the real API server with KubeRay; the pods pend, so no trainer has to be asked."""

import json
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.conftest import pool

pytestmark = pytest.mark.usefixtures("volumes", "claim")


def patch(kubectl: Any, name: str, **sections: Any) -> Any:
    """Merge sections into a job's spec, as `kubectl apply` would; return what came."""
    return kubectl.run("patch", "ppojob", name, "--type=merge", f"--patch={json.dumps({'spec': sections})}")


def clusters(kubectl: Any, name: str) -> list[Any]:
    """Return the job's RayClusters that are there to stay."""
    items = kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"]
    return [item for item in items if "deletionTimestamp" not in item["metadata"]]


def secrets(kubectl: Any, name: str) -> list[str]:
    """Return the names of the job's Secrets."""
    items = kubectl.json("get", "secrets", "--selector", f"ppojob.dev/job={name}")["items"]
    return [item["metadata"]["name"] for item in items]


def groups(cluster: Any) -> dict[str, int]:
    """Return how many pods each group of a RayCluster has."""
    return {group["groupName"]: group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]}


def test_a_job_is_created_suspended_set_free_and_suspended_again(kubectl: Any, jobs: Any) -> None:
    name = jobs.create(runPolicy={"suspend": True})
    jobs.wait_for(name, Condition.SUSPENDED, "True", Reason.SUSPENDED)
    assert clusters(kubectl, name) == []
    assert "startTime" not in jobs.status(name)
    assert kubectl("get", "ppojobs", name).splitlines()[1].split()[1] == "Suspended"

    assert patch(kubectl, name, runPolicy={"suspend": False}).returncode == 0
    jobs.wait_for(name, Condition.SUSPENDED, "False", Reason.RESUMED)
    first = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    kubectl("wait", "--for=create", "pods", "--selector", f"ppojob.dev/job={name}", "--timeout=240s")

    assert patch(kubectl, name, runPolicy={"suspend": True}).returncode == 0
    jobs.wait_for(name, Condition.SUSPENDED, "True", Reason.SUSPENDED)
    kubectl("wait", "--for=delete", "rayclusters,pods", "--selector", f"ppojob.dev/job={name}", "--timeout=240s")
    assert jobs.status(name)["ready"] == "0/2"
    jobs.wait_until(lambda: secrets(kubectl, name) == [])

    assert patch(kubectl, name, runPolicy={"suspend": False}).returncode == 0
    second = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    assert second != first
    assert secrets(kubectl, name) == [f"{second}-ray"]
    assert jobs.status(name)["retries"]["total"] == 0


def test_another_layout_replaces_the_cluster_and_says_what_changed(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    first = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]

    pools = [pool("actor"), pool("critic", nodes=2), pool("judge")]
    done = patch(kubectl, name, pools=pools, placement={"reward": ["judge"]})
    assert done.returncode == 0, done.stderr
    jobs.wait_for(name, Condition.LAYOUT_APPLIED, "True", Reason.LAYOUT_APPLIED)
    kubectl("wait", "--for=delete", f"raycluster/{first}", "--timeout=240s")
    jobs.wait_until(lambda: bool(clusters(kubectl, name)))

    [cluster] = clusters(kubectl, name)
    assert groups(cluster) == {"actor": 1, "critic": 2, "judge": 1}
    status = jobs.wait(name, lambda status: [each["desiredNodes"] for each in status["pools"]] == [1, 2, 1])
    assert [each["nodes"] for each in status["effectiveLayout"]["pools"]] == [1, 2, 1]
    assert status["retries"]["total"] == 0
    # Events follow the status.
    for words in ("pool critic: nodes 1 -> 2", "placement.reward [critic] -> [judge]"):
        jobs.wait_until(lambda words=words: words in kubectl("describe", "ppojob", name).partition("Events:")[2])


def test_a_layout_that_cannot_be_run_changes_nothing_and_is_named(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    first = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]

    refused = patch(kubectl, name, placement={"critic": "nowhere"})
    assert refused.returncode != 0
    assert "placement.critic must be the name of one of spec.pools" in refused.stderr

    bad = pool("critic", podTemplate={"spec": {"restartPolicy": "Always"}})
    assert patch(kubectl, name, pools=[pool("actor"), bad]).returncode == 0
    message = jobs.wait_for(name, Condition.LAYOUT_APPLIED, "False", Reason.INVALID_SPEC)
    assert "spec.pools[1].podTemplate.spec.restartPolicy: 'Always'" in message
    assert [cluster["metadata"]["name"] for cluster in clusters(kubectl, name)] == [first]
    assert jobs.condition(name, Condition.ACCEPTED)["status"] == "True"

    assert patch(kubectl, name, pools=[pool("actor"), pool("critic")]).returncode == 0
    jobs.wait_for(name, Condition.LAYOUT_APPLIED, "True", Reason.LAYOUT_APPLIED)
    assert [cluster["metadata"]["name"] for cluster in clusters(kubectl, name)] == [first]
