"""The Job that fetches models and data on a real API server: made before any RayCluster, gone with its job."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason

pytestmark = pytest.mark.usefixtures("volumes", "claim")

MODEL = {"actor": {"path": "hf://acme/tiny"}}


def job_of(kubectl: Any, name: str) -> list[dict[str, Any]]:
    """Return the batch/v1 Jobs of a PPOJob."""
    found: list[dict[str, Any]] = kubectl.json("get", "jobs.batch", "--selector", f"ppojob.dev/job={name}")["items"]
    return found


def test_the_job_comes_before_the_raycluster_and_its_pod_is_explained(kubectl: Any, jobs: Any) -> None:
    name = jobs.create(model=MODEL)

    jobs.wait_for(name, Condition.SOURCES_FETCHED, "False", Reason.FETCHING)
    jobs.wait_until(
        lambda: "nothing:1" in jobs.condition(name, Condition.SOURCES_FETCHED).get("message", ""), limit=240
    )

    assert jobs.status(name)["phase"] == "Fetching"
    assert [job["metadata"]["name"] for job in job_of(kubectl, name)] == [f"{name}-fetch"]
    assert kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"] == []


def test_its_pod_meets_the_restricted_standard(kubectl: Any, jobs: Any) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    name = jobs.create(model=MODEL)
    selector = f"ppojob.dev/job={name},ppojob.dev/task=fetch"

    jobs.wait_until(lambda: len(kubectl.json("get", "pods", "--selector", selector)["items"]) == 1)

    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce-")


def test_it_goes_with_a_suspension_and_comes_again(kubectl: Any, jobs: Any) -> None:
    name = jobs.create(model=MODEL)
    jobs.wait_until(lambda: len(job_of(kubectl, name)) == 1)
    first = job_of(kubectl, name)[0]["metadata"]["uid"]

    kubectl("patch", "ppojob", name, "--type=merge", "--patch", '{"spec": {"runPolicy": {"suspend": true}}}')
    kubectl("wait", "--for=delete", f"jobs.batch/{name}-fetch", "--timeout=240s")
    kubectl("patch", "ppojob", name, "--type=merge", "--patch", '{"spec": {"runPolicy": {"suspend": false}}}')

    jobs.wait_until(lambda: [job["metadata"]["uid"] != first for job in job_of(kubectl, name)] == [True])


def test_an_edited_environment_replaces_it(kubectl: Any, jobs: Any) -> None:
    name = jobs.create(model=MODEL)
    jobs.wait_until(lambda: len(job_of(kubectl, name)) == 1)

    patch = '{"spec": {"env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}]}}'
    kubectl("patch", "ppojob", name, "--type=merge", "--patch", patch)

    jobs.wait_until(lambda: "https://mirror.example" in str(job_of(kubectl, name)))


def test_it_goes_with_its_job(kubectl: Any, jobs: Any) -> None:
    name = jobs.create(model=MODEL)
    jobs.wait_until(lambda: len(job_of(kubectl, name)) == 1)

    kubectl("delete", "ppojob", name)

    kubectl("wait", "--for=delete", f"jobs.batch/{name}-fetch", "--timeout=240s")


def test_a_job_of_somebody_else_is_left_alone_and_named(kubectl: Any, jobs: Any) -> None:
    container = {"name": "x", "image": "localhost:5000/ppojob/nothing:1"}
    other = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "taken-fetch", "namespace": kubectl.namespace},
        "spec": {"suspend": True, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }
    assert kubectl.apply(other).returncode == 0

    name = jobs.create(name="taken", model=MODEL)
    jobs.wait_until(lambda: "taken-fetch" in jobs.condition(name, Condition.SOURCES_FETCHED).get("message", ""))

    assert "belongs to nobody" in jobs.condition(name, Condition.SOURCES_FETCHED)["message"]
    assert kubectl.json("get", "job", "taken-fetch")["metadata"].get("ownerReferences") is None
    kubectl("delete", "job", "taken-fetch")
