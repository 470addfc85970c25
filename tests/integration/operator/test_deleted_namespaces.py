"""A namespace is deleted while a job starts in it: the operator creates nothing there any more."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import Kubectl
from tests.integration.operator.conftest import Jobs, OperatorProcess, Rights, granted, render_chart

LIMIT_SECONDS = 120.0
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


@pytest.fixture(scope="module")
def there(cluster: Any) -> Iterator[Kubectl]:
    """Another namespace that the release watches."""
    kubectl = Kubectl(f"test-{uuid.uuid4().hex[:8]}")
    kubectl("create", "namespace", kubectl.namespace)
    yield kubectl
    kubectl("delete", "namespace", kubectl.namespace, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def rights(kubectl: Any, there: Kubectl, _alone: None) -> Iterator[Rights]:
    chart = render_chart(kubectl.namespace, f"watchNamespaces={{{kubectl.namespace},{there.namespace}}}")
    others = [each for each in chart if each["metadata"].get("namespace") == there.namespace]
    with granted(kubectl, [each for each in chart if each not in others]) as rights:
        assert there.apply(*others).returncode == 0
        yield rights


def clusters(kubectl: Kubectl) -> set[str]:
    """Return the uids of the RayClusters."""
    return {item["metadata"]["uid"] for item in kubectl.json("get", "rayclusters")["items"]}


def test_nothing_is_created_in_a_namespace_that_is_being_deleted(there: Kubectl, operator: OperatorProcess) -> None:
    jobs = Jobs(there, operator.log)
    assert there.apply(CLAIM).returncode == 0
    names = [jobs.create() for _ in range(3)]
    for name in names:
        jobs.wait(name, lambda status: "rayCluster" in status)
    jobs.wait_until(lambda: len(clusters(there)) == len(names))
    before, seen = clusters(there), set[str]()

    there("delete", "namespace", there.namespace, "--wait=false")
    end = time.monotonic() + LIMIT_SECONDS
    while there.run("get", "namespace", there.namespace).returncode == 0:
        assert time.monotonic() < end, operator.log.read_text()[-4000:]
        seen |= clusters(there)
        time.sleep(0.1)

    assert seen <= before
    log = operator.log.read_text()
    assert "nothing is created for it any more" in log
    for noise in ("Traceback", "retry in", "ApiRequestFailed"):
        assert noise not in log, log[-4000:]
    assert operator.probe("healthz") == 200
