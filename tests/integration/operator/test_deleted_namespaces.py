"""A namespace is deleted while a job starts in it: the operator creates nothing there any more."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import Kubectl
from tests.integration.operator.conftest import Jobs, OperatorProcess, Rights, granted, render_chart

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "data"},
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "resources": {"requests": {"storage": "1Gi"}},
    },
}
"""No volume fits it: the pods are created and never bound, so that they are deleted at once."""
HOLD = ["ppojob.dev/test"]
"""Finalizer of the operator's rights there, which would otherwise be deleted at any time before the jobs."""


@pytest.fixture(scope="module")
def there(cluster: Any) -> Iterator[Kubectl]:
    """Another namespace that the release watches."""
    kubectl = Kubectl(f"test-{uuid.uuid4().hex[:8]}")
    kubectl("create", "namespace", kubectl.namespace)
    yield kubectl
    kubectl("delete", "namespace", kubectl.namespace, "--ignore-not-found", "--wait=false")
    release_rights(kubectl)


@pytest.fixture(scope="module")
def rights(kubectl: Any, there: Kubectl, _alone: None) -> Iterator[Rights]:
    chart = render_chart(kubectl.namespace, f"watchNamespaces={{{kubectl.namespace},{there.namespace}}}")
    others = [each for each in chart if each["metadata"].get("namespace") == there.namespace]
    with granted(kubectl, [each for each in chart if each not in others]) as rights:
        held = [each | {"metadata": each["metadata"] | {"finalizers": HOLD}} for each in others]
        assert there.apply(*held).returncode == 0
        yield rights


@pytest.fixture(scope="module")
def operator(rights: Rights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator that waits for a busy API server: its log must have no request that failed."""
    process = rights.operator(tmp_path_factory.mktemp("operator"))
    process.environment["PPOJOB_REQUEST_TIMEOUT"] = "60"
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


@pytest.fixture
def undeletable_jobs(there: Kubectl) -> Iterator[None]:
    """The API server refuses to delete the jobs there, so that their RayClusters are deleted before them."""
    name = there.namespace
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": ["ppojob.dev"],
                        "apiVersions": ["*"],
                        "operations": ["DELETE"],
                        "resources": ["ppojobs"],
                    }
                ]
            },
            "validations": [{"expression": "false", "message": "held by a test"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {
            "policyName": name,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}},
        },
    }
    assert there.apply(policy, binding).returncode == 0
    yield
    delete_hold(there)


def delete_hold(kubectl: Kubectl) -> None:
    """Let the jobs of a namespace be deleted."""
    for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
        kubectl("delete", kind, kubectl.namespace, "--ignore-not-found")


def clusters(kubectl: Kubectl) -> set[str]:
    """Return the uids of the RayClusters."""
    return {item["metadata"]["uid"] for item in kubectl.json("get", "rayclusters")["items"]}


def release_rights(kubectl: Kubectl) -> None:
    """Let the operator's rights in a namespace be deleted."""
    for item in kubectl.json("get", "roles,rolebindings")["items"]:
        if item["metadata"].get("finalizers") == HOLD:
            name = f"{item['kind'].lower()}/{item['metadata']['name']}"
            kubectl("patch", name, "--type=merge", "--patch", '{"metadata": {"finalizers": null}}')


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("undeletable_jobs")
def test_nothing_is_created_in_a_namespace_that_is_being_deleted(there: Kubectl, operator: OperatorProcess) -> None:
    jobs = Jobs(there, operator.log)
    assert there.apply(CLAIM).returncode == 0
    names = [jobs.create() for _ in range(3)]
    for name in names:
        jobs.wait(name, lambda status: "rayCluster" in status)
    jobs.wait_until(lambda: len(clusters(there)) == len(names))
    jobs.wait_until(lambda: there.run("delete", "ppojob", names[0], "--dry-run=server").returncode != 0)
    before = clusters(there)

    there("delete", "namespace", there.namespace, "--wait=false")
    # The RayClusters go, their jobs stay: a reconcile of each job tries to create its RayCluster again.
    jobs.wait_until(lambda: all(refusal(name) in operator.log.read_text() for name in names))
    assert clusters(there) <= before
    assert {item["metadata"]["name"] for item in there.json("get", "ppojobs")["items"]} == set(names)

    delete_hold(there)
    # The namespace's controller tries again up to a minute after its last try.
    jobs.wait_until(lambda: not there.json("get", "ppojobs")["items"], limit=300)
    log = operator.log.read_text()
    for noise in ("Traceback", "retry in", "ApiRequestFailed"):
        assert noise not in log, log[-4000:]
    assert operator.probe("healthz") == 200

    release_rights(there)
    jobs.wait_until(lambda: there.run("get", "namespace", there.namespace).returncode != 0, limit=300)


def refusal(name: str) -> str:
    """Return the operator's line about a job that cannot have its RayCluster any more."""
    return f"/{name}: nothing is created for it any more"
