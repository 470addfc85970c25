"""Objects come and go with their job, and the operator may come and go too."""

import json
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason

pytestmark = pytest.mark.usefixtures("volumes", "claim")

OWNED = "rayclusters,configmaps,serviceaccounts,secrets,networkpolicies,pods"


def names(kubectl: Any, job: str) -> list[str]:
    """Return kind and name of everything that belongs to a job."""
    items = kubectl.json("get", OWNED, "--selector", f"ppojob.dev/job={job}")["items"]
    return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in items)


def test_a_job_has_its_objects_and_takes_them_along_when_it_goes(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    cluster = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    kubectl("wait", "--for=create", "pods", "--selector", f"ppojob.dev/job={name}", "--timeout=240s")

    found = names(kubectl, name)
    assert {each for each in found if not each.startswith("Pod/")} == {
        f"ConfigMap/{name}-job",
        f"NetworkPolicy/{name}-ray",
        f"RayCluster/{cluster}",
        f"Secret/{cluster}-ray",
        f"ServiceAccount/{name}-trainer",
    }

    kubectl("delete", "ppojob", name)
    # KubeRay may create a pod until its RayCluster is deleted.
    jobs.wait_until(lambda: names(kubectl, name) == [], limit=240)


def test_the_pods_of_a_job_meet_the_restricted_standard(kubectl: Any, jobs: Any) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    name = jobs.create()

    jobs.wait_until(lambda: sum(each.startswith("Pod/") for each in names(kubectl, name)) == 3, limit=240)

    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce-")


def test_status_has_two_owners_who_leave_each_others_fields_alone(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    jobs.wait(name, lambda status: status.get("phase") == "Starting")
    report = '{"apiVersion":"ppojob.dev/v1alpha1","kind":"PPOJob","status":{"progress":{"step":3,"totalSteps":8}}}'
    arguments = ("apply", "--server-side", "--subresource=status", "--field-manager=ppojob-progress", "--filename=-")
    body = report.replace('"kind":"PPOJob"', f'"kind":"PPOJob","metadata":{{"name":"{name}"}}')
    kubectl(*arguments, stdin=body)

    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)

    assert jobs.status(name)["progress"]["step"] == 3
    managers = kubectl.json("get", "ppojob", name, "--show-managed-fields")["metadata"]["managedFields"]
    assert {each["manager"] for each in managers if each.get("subresource") == "status"} == {
        "ppojob-operator",
        "ppojob-progress",
    }


def test_a_new_operator_continues_where_the_last_one_stopped(kubectl: Any, jobs: Any, operator: Any) -> None:
    name = jobs.create()
    before = jobs.wait(name, lambda status: "rayCluster" in status)

    assert operator.stop() == 0
    assert "stopped gracefully" in operator.log.read_text()
    operator.start()
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)

    after = jobs.status(name)
    assert after["rayCluster"]["name"] == before["rayCluster"]["name"]
    assert after["startTime"] == before["startTime"]
    assert len(kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"]) == 1


def test_a_config_map_that_somebody_deleted_comes_back(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    jobs.wait(name, lambda status: "rayCluster" in status)

    kubectl("delete", "configmap", f"{name}-job")

    kubectl("wait", "--for=create", f"configmap/{name}-job", "--timeout=240s")


def test_a_cluster_that_somebody_edited_is_as_it_was_and_an_event_says_so(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    cluster = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    path = "/spec/workerGroupSpecs/0/replicas"
    before = kubectl.json("get", "raycluster", cluster)["spec"]["workerGroupSpecs"][0]["replicas"]

    patch = [{"op": "replace", "path": "/spec/workerGroupSpecs/0/maxReplicas", "value": before + 1}]
    patch.append({"op": "replace", "path": path, "value": before + 1})
    patch.append({"op": "replace", "path": "/spec/authOptions/mode", "value": "disabled"})
    kubectl("patch", "raycluster", cluster, "--type=json", f"--patch={json.dumps(patch)}")

    jsonpath = f"jsonpath={{.spec.workerGroupSpecs[0].replicas}}={before}"
    kubectl("wait", f"raycluster/{cluster}", f"--for={jsonpath}", "--timeout=240s")
    event = jobs.event(name, Reason.CLUSTER_RESTORED)
    assert f".replicas was {before + 1} instead of {before}" in event["message"]
    assert "spec.authOptions.mode was disabled instead of token" in event["message"]
    assert kubectl.json("get", "raycluster", cluster)["spec"]["authOptions"]["mode"] == "token"


def test_an_object_of_somebody_else_is_named_and_not_taken_over(kubectl: Any, jobs: Any) -> None:
    kubectl("create", "configmap", "taken-job", "--from-literal=mine=1")

    name = jobs.create(name="taken")

    message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.CLUSTER_REFUSED)
    assert "ConfigMap taken-job exists and belongs to nobody" in message
    assert "give the PPOJob another name" in message
    assert kubectl.json("get", "configmap", "taken-job")["data"] == {"mine": "1"}
    kubectl("delete", "configmap", "taken-job")
    kubectl("wait", "--for=create", "configmap/taken-job", "--timeout=240s")


def test_a_job_shows_its_state_in_the_table(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    jobs.wait(name, lambda status: status.get("ready") == "0/2")

    header, row = kubectl("get", "ppojobs", name).splitlines()

    assert header.split() == ["NAME", "PHASE", "STEP", "PROGRESS", "REWARD", "READY", "RETRIES", "AGE"]
    assert row.split()[:2] == [name, "Starting"]
    assert "0/2" in row.split()


def test_an_accepted_job_cannot_be_changed_where_it_matters(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)

    refused = kubectl.run("patch", "ppojob", name, "--type=merge", '--patch={"spec":{"trainer":{"seed":7}}}')
    allowed = kubectl.run("patch", "ppojob", name, "--type=merge", '--patch={"spec":{"runPolicy":{"backoffLimit":9}}}')

    assert refused.returncode != 0
    assert "spec.trainer.seed: 7: cannot change once the job is accepted" in refused.stderr
    assert allowed.returncode == 0, allowed.stderr
    jobs.wait(name, lambda status: status["observedGeneration"] == 2)


def test_a_cluster_that_somebody_suspends_is_said_and_left_alone(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    cluster = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)

    kubectl("patch", "raycluster", cluster, "--type=merge", '--patch={"spec":{"suspend":true}}')
    message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.CLUSTER_SUSPENDED)
    assert cluster in message
    kubectl("wait", "--for=delete", "pods", "--selector", f"ppojob.dev/job={name}", "--timeout=240s")
    assert kubectl.json("get", "raycluster", cluster)["spec"]["suspend"] is True

    kubectl("patch", "raycluster", cluster, "--type=merge", '--patch={"spec":{"suspend":false}}')
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)


def test_what_comes_again_is_one_event_that_is_counted(kubectl: Any, jobs: Any) -> None:
    name = jobs.create()
    cluster = jobs.wait(name, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)
    for _ in range(2):
        kubectl("patch", "raycluster", cluster, "--type=merge", '--patch={"spec":{"suspend":true}}')
        jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.CLUSTER_SUSPENDED)
        kubectl("patch", "raycluster", cluster, "--type=merge", '--patch={"spec":{"suspend":false}}')
        jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)

    # KubeRay may say so again while the pods come and go.
    event = jobs.event(name, Reason.CLUSTER_SUSPENDED, times=2)
    assert event["lastTimestamp"] > event["firstTimestamp"]
