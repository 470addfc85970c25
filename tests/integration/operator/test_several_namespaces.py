"""One release for some namespaces of a cluster: it runs their jobs, and has no rights in others, whose jobs wait."""

import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.conftest import Kubectl
from tests.integration.operator.conftest import Jobs, OperatorProcess, Rights, granted, render_chart


@pytest.fixture(scope="module")
def others(cluster: Any) -> Iterator[tuple[Kubectl, Kubectl]]:
    """Two more namespaces: one that the release watches, and one that it does not."""
    made = tuple(Kubectl(f"test-{uuid.uuid4().hex[:8]}") for _ in range(2))
    for kubectl in made:
        kubectl("create", "namespace", kubectl.namespace)
    yield (made[0], made[1])
    for kubectl in made:
        kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


@pytest.fixture(scope="module")
def rights(kubectl: Any, others: tuple[Kubectl, Kubectl], _alone: None) -> Iterator[Rights]:
    watched, _ = others
    chart = render_chart(kubectl.namespace, f"watchNamespaces={{{kubectl.namespace},{watched.namespace}}}")
    there = [each for each in chart if each["metadata"].get("namespace") == watched.namespace]
    assert {each["kind"] for each in there} == {"Role", "RoleBinding"}
    with granted(kubectl, [each for each in chart if each not in there]) as rights:
        assert watched.apply(*there).returncode == 0
        assert rights.environment["PPOJOB_WATCH_NAMESPACES"] == f"{kubectl.namespace},{watched.namespace}"
        yield rights


@pytest.fixture(scope="module")
def operator(rights: Rights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    process = rights.operator(tmp_path_factory.mktemp("operator"))
    process.environment["PPOJOB_IDLE_INTERVAL"] = "2"
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


@pytest.fixture
def of_each(kubectl: Any, others: tuple[Kubectl, Kubectl], operator: OperatorProcess) -> Iterator[list[Jobs]]:
    found = [Jobs(each, operator.log) for each in (kubectl, *others)]
    yield found
    for jobs in found:
        for name in jobs.made:
            jobs.kubectl("delete", "ppojob", name, "--ignore-not-found", "--wait=false")


def may(rights: Rights, tmp_path: Path, namespace: str, verb: str, resource: str) -> bool:
    """Whether the operator's account may do something in a namespace."""
    (tmp_path / "kubeconfig").write_text(json.dumps(rights.kubeconfig))
    command = ["kubectl", f"--kubeconfig={tmp_path}/kubeconfig", f"--namespace={namespace}", "auth", "can-i"]
    done = subprocess.run([*command, verb, resource], capture_output=True, text=True, timeout=300, check=False)
    return done.stdout.strip() == "yes"


def test_jobs_of_the_watched_namespaces_run_and_others_wait(of_each: list[Jobs]) -> None:
    own, watched, other = of_each
    names = [jobs.create(storage={"claimName": "missing"}) for jobs in (own, watched, other)]

    for jobs, name in zip((own, watched), names, strict=False):
        jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.STORAGE_MISSING)
        # The watch reports edits in each of them, long before a poll would.
        jobs.kubectl("patch", "ppojob", name, "--type=merge", '--patch={"spec":{"runPolicy":{"suspend":true}}}')
        jobs.wait(name, lambda status: status.get("observedGeneration") == 2)
    assert other.status(names[2]) == {}


def test_the_account_has_its_rights_in_the_watched_namespaces_alone(
    kubectl: Any, others: tuple[Kubectl, Kubectl], rights: Rights, tmp_path: Path
) -> None:
    watched, other = others
    for verb, resource in (("list", "ppojobs"), ("create", "rayclusters.ray.io"), ("get", "pods")):
        allowed = [may(rights, tmp_path, each.namespace, verb, resource) for each in (kubectl, watched, other)]
        assert allowed == [True, True, False], (verb, resource)
    # What belongs to the release is in its own namespace.
    assert [
        may(rights, tmp_path, each.namespace, "create", "leases.coordination.k8s.io") for each in (kubectl, watched)
    ] == [True, False]


def test_a_namespace_that_is_lost_leaves_the_other_one_running(
    of_each: list[Jobs], operator: OperatorProcess, rights: Rights, tmp_path: Path
) -> None:
    own, watched, _ = of_each

    def num_refused_lists() -> int:
        return operator.log.read_text().count("the resync could not list the jobs")

    [binding] = [
        each["metadata"]["name"]
        for each in watched.kubectl.json("get", "rolebindings")["items"]
        if each["metadata"]["name"].startswith("ppojob")
    ]
    kept = watched.kubectl.json("get", "rolebinding", binding)
    watched.kubectl("delete", "rolebinding", binding)
    try:
        own.wait_until(lambda: not may(rights, tmp_path, watched.kubectl.namespace, "list", "ppojobs"))
        refused = num_refused_lists()
        own.wait_until(lambda: num_refused_lists() > refused)
        first = own.create(storage={"claimName": "missing"})
        lost = watched.create(storage={"claimName": "missing"})
        own.wait_for(first, Condition.ACCEPTED, "False", Reason.STORAGE_MISSING)
        assert operator.probe("healthz") == 200
        assert watched.status(lost) == {}
    finally:
        del kept["metadata"]["resourceVersion"], kept["metadata"]["uid"]
        assert watched.kubectl.apply(kept).returncode == 0
    watched.wait_for(lost, Condition.ACCEPTED, "False", Reason.STORAGE_MISSING)
