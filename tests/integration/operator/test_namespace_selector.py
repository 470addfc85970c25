"""One release for the namespaces with a label: labels come and go while it runs, and the API server evaluates them."""

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, Configuration

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.api_server import ApiServer
from ppojob_operator.cluster import Cluster
from ppojob_operator.label_selector import LabelSelector
from tests.integration.conftest import Kubectl
from tests.integration.operator.conftest import Jobs, OperatorProcess, Rights, granted, render_chart
from tests.integration.operator.hiding_proxy import HidingProxy, Right

pytestmark = pytest.mark.usefixtures("volumes", "claim")

NEVER = "86400"
"""Seconds between two resyncs: what is found in these tests was reported by the watches."""


@pytest.fixture(scope="module")
def label() -> str:
    """The label of this module: other tests run on the same cluster."""
    return f"ppojob.dev/enabled-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def other(cluster: Any) -> Iterator[Kubectl]:
    """A namespace without the label."""
    kubectl = Kubectl(f"test-{uuid.uuid4().hex[:8]}")
    kubectl("create", "namespace", kubectl.namespace)
    yield kubectl
    kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


@pytest.fixture(scope="module")
def rights(kubectl: Any, label: str, _alone: None) -> Iterator[Rights]:
    name = label.replace(".", "\\.")
    chart = render_chart(kubectl.namespace, "watchNamespaces=null", f"namespaceSelector.matchLabels.{name}=yes")
    with granted(kubectl, chart) as rights:
        assert label in rights.environment["PPOJOB_NAMESPACE_SELECTOR"]
        yield rights


@pytest.fixture(scope="module")
def proxy(rights: Rights) -> Iterator[HidingProxy]:
    with rights.proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def operator(
    kubectl: Any, label: str, rights: Rights, proxy: HidingProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    set_label(kubectl, label, "yes")
    process = rights.operator_behind(proxy, tmp_path_factory.mktemp("operator"), PPOJOB_IDLE_INTERVAL=NEVER)
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


@pytest.fixture
def elsewhere(other: Kubectl, operator: OperatorProcess) -> Iterator[Jobs]:
    """Jobs of the other namespace."""
    made = Jobs(other, operator.log)
    yield made
    for name in made.made:
        other("delete", "ppojob", name, "--ignore-not-found", "--wait=false")


def set_label(kubectl: Kubectl, label: str, value: str | None) -> None:
    """Give a namespace the label, or take it away."""
    change = f"{label}-" if value is None else f"{label}={value}"
    kubectl("label", "namespace", kubectl.namespace, "--overwrite", change)


def suspend(kubectl: Kubectl, name: str, *, wanted: bool) -> None:
    patch = f'{{"spec":{{"runPolicy":{{"suspend":{str(wanted).lower()}}}}}}}'
    kubectl("patch", "ppojob", name, "--type=merge", f"--patch={patch}")


def test_a_job_waits_untouched_until_its_namespace_gets_the_label(
    kubectl: Any, jobs: Jobs, other: Kubectl, elsewhere: Jobs, label: str, operator: OperatorProcess
) -> None:
    ignored = elsewhere.create(storage={"claimName": "missing"})
    served = jobs.create(storage={"claimName": "missing"})
    jobs.wait_for(served, Condition.ACCEPTED, "False", Reason.STORAGE_MISSING)
    jobs.wait_until(lambda: f"{other.namespace}/{ignored}: namespace" in operator.log.read_text())
    assert elsewhere.status(ignored) == {}
    assert other.json("get", "events", "--field-selector", f"involvedObject.name={ignored}")["items"] == []

    set_label(other, label, "no")
    assert elsewhere.status(ignored) == {}
    set_label(other, label, "yes")
    elsewhere.wait_for(ignored, Condition.ACCEPTED, "False", Reason.STORAGE_MISSING)

    # It waits, so it is released with the label, for another release to take it; and it comes back with the label.
    set_label(other, label, None)
    elsewhere.wait(ignored, lambda status: "operator" not in status)
    words = elsewhere.event(ignored, Reason.NAMESPACE_NOT_SERVED)["message"]
    assert f"namespace {other.namespace} does not match namespaceSelector ({label}=yes)" in words
    set_label(other, label, "yes")
    elsewhere.wait(ignored, lambda status: status.get("operator", {}).get("namespace") == kubectl.namespace)


def test_a_job_with_a_ray_cluster_is_reconciled_until_it_is_suspended_and_then_does_not_start_again(
    kubectl: Any, jobs: Jobs, label: str
) -> None:
    name = jobs.create()
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)
    [cluster] = [each["metadata"]["name"] for each in kubectl.json("get", "rayclusters")["items"]]
    try:
        set_label(kubectl, label, None)
        # Namespaces and jobs have separate watches: that of the jobs may report the new one first.
        jobs.wait_until(lambda: f"namespace {kubectl.namespace} is not served any more" in jobs.log.read_text())
        new = jobs.create()
        suspend(kubectl, name, wanted=True)
        jobs.wait_for(name, Condition.SUSPENDED, "True", Reason.SUSPENDED)
        kubectl("wait", "--for=delete", f"raycluster/{cluster}", "--timeout=240s")
        jobs.event(name, Reason.NAMESPACE_NOT_SERVED)
        assert "operator" not in jobs.status(name)

        suspend(kubectl, name, wanted=False)
        jobs.wait_until(lambda: kubectl.json("get", "ppojob", name)["metadata"]["generation"] == 3)
        jobs.wait_until(lambda: f"{kubectl.namespace}/{new}: namespace" in jobs.log.read_text())
        assert (jobs.status(new), kubectl.json("get", "rayclusters")["items"]) == ({}, [])
        assert jobs.status(name)["phase"] == "Suspended"
    finally:
        set_label(kubectl, label, "yes")
    for each in (name, new):
        jobs.wait(each, lambda status: "rayCluster" in status)


def test_its_right_on_namespaces_is_used_and_no_call_is_refused(operator: OperatorProcess, proxy: HidingProxy) -> None:
    used = {right for right in proxy.used if right.resource == "namespaces"}

    assert used == {Right("list", "", "namespaces"), Right("watch", "", "namespaces")}
    assert "forbidden" not in operator.log.read_text()


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ({"operator": "In", "values": ["red"]}, "r"),
        ({"operator": "In", "values": ["red", "blue"]}, "rb"),
        ({"operator": "In", "values": [""]}, "e"),
        ({"operator": "In", "values": ["", "red"]}, "re"),
        ({"operator": "NotIn", "values": ["red"]}, "ben"),
        ({"operator": "NotIn", "values": ["red", "blue", ""]}, "n"),
        ({"operator": "Exists"}, "rbe"),
        ({"operator": "DoesNotExist"}, "n"),
    ],
)
async def test_the_api_server_evaluates_each_operator(
    colored: tuple[str, dict[str, str]], requirement: dict[str, Any], expected: str
) -> None:
    key, names = colored
    both = {"matchLabels": {f"{key}-of": "tests"}, "matchExpressions": [{"key": key, **requirement}]}
    configuration = Configuration()
    await kubernetes_config.load_kube_config(config_file=os.environ["KUBECONFIG"], client_configuration=configuration)  # type: ignore[no-untyped-call]
    async with ApiClient(configuration) as client:
        cluster = Cluster(ApiServer(client, timeout=120.0), reporter="test")
        found = await cluster.list_namespaces(str(LabelSelector.model_validate(both)))

    assert {names[each] for each in found} == set(expected)


@pytest.fixture(scope="module")
def colored(cluster: Any, label: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The name of a label, and four namespaces: red, blue, with an empty value, and without the label."""
    key, names = label.replace("enabled", "color"), {}
    for letter, value in (("r", "red"), ("b", "blue"), ("e", ""), ("n", None)):
        name = f"test-{uuid.uuid4().hex[:8]}"
        cluster("create", "namespace", name)
        cluster("label", "namespace", name, f"{key}-of=tests", *([] if value is None else [f"{key}={value}"]))
        names[name] = letter
    yield key, names
    cluster("delete", "namespaces", *names, "--wait=false")
