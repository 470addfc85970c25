"""Every problem of a job is shown on the job; the operator continues with other jobs."""

from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.conftest import pool

pytestmark = pytest.mark.usefixtures("volumes")


def test_a_claim_that_does_not_exist_is_named_and_picked_up_when_it_comes(
    kubectl: Any, jobs: Any, request: pytest.FixtureRequest
) -> None:
    name = jobs.create()

    message = jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.STORAGE_MISSING)
    assert message.startswith("spec.storage.claimName: 'data': there is no such claim")
    assert kubectl.json("get", "rayclusters")["items"] == []
    assert jobs.status(name)["phase"] == "Pending"

    request.getfixturevalue("claim")
    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)


@pytest.mark.usefixtures("claim")
def test_an_image_that_cannot_be_pulled_is_said_in_the_kubelets_words(jobs: Any) -> None:
    name = jobs.create()

    message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)

    assert "localhost:5000/ppojob/nothing:1" in message


@pytest.mark.usefixtures("claim")
def test_what_the_schema_cannot_see_is_refused_with_path_and_remedy(kubectl: Any, jobs: Any) -> None:
    name = jobs.create(env=[{"name": "RAY_ADDRESS", "value": "auto"}])

    message = jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.INVALID_SPEC)

    assert message.startswith("spec.env[0].name: 'RAY_ADDRESS': this variable is set by")
    assert kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"] == []
    # The Event follows the status.
    jobs.wait_until(lambda: "InvalidSpec" in kubectl("describe", "ppojob", name).partition("Events:")[2])


@pytest.mark.usefixtures("claim")
def test_a_pod_template_that_is_none_is_said_in_the_api_servers_words(jobs: Any) -> None:
    head = {"resources": {"cpu": "10m", "memory": "10Mi"}, "podTemplate": {"spec": {"nonsense": 1}}}
    name = jobs.create(head=head)

    message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.CLUSTER_REFUSED)

    assert "nonsense" in message


MANAGED = [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": "5"}]


@pytest.mark.usefixtures("claim")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": {"podTemplate": {"spec": {"nodeSelector": {"gpu": True}}}}}, "nodeSelector.gpu"),
        ({"head": {"podTemplate": {"spec": {"tolerations": MANAGED}}}}, "tolerationSeconds"),
        ({"imagePullSecrets": [{"name": "twice"}, {"name": "twice"}]}, "imagePullSecrets"),
        ({"storage": {"claimName": "data", "mountPath": "/dev/shm"}}, "/dev/shm"),
    ],
    ids=["a boolean as a label", "a string as seconds", "a secret twice", "a mount twice"],
)
def test_types_and_keys_that_only_the_api_server_checks_are_shown(
    jobs: Any, changes: dict[str, Any], words: str
) -> None:
    name = jobs.create(**changes)

    conditions = jobs.wait(name, lambda status: refusal(status))["conditions"]

    assert words in " ".join(each["message"] for each in conditions if each["status"] == "False")


def try_pod(kubectl: Any) -> str:
    """Return what the API server says of a pod that nobody creates: it knows quotas and labels with a delay."""
    said: str = kubectl.run("run", "probe", "--image=nothing:1", "--dry-run=server").stderr
    return said


def refusal(status: Any) -> bool:
    reasons = {each["reason"] for each in status.get("conditions", []) if each["status"] == "False"}
    return bool(reasons & {Reason.CLUSTER_REFUSED, Reason.INVALID_SPEC})


@pytest.mark.usefixtures("claim")
def test_labels_that_are_no_labels_are_refused_with_the_field(jobs: Any) -> None:
    name = jobs.create(head={"podTemplate": {"metadata": {"labels": ["a"]}}})

    message = jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.INVALID_SPEC)

    assert message.startswith("spec.head.podTemplate.metadata.labels: ['a']: must be an object")


@pytest.mark.usefixtures("claim")
def test_a_quota_that_is_used_up_is_said_in_the_api_servers_words(kubectl: Any, jobs: Any) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-pods", "namespace": kubectl.namespace},
        "spec": {"hard": {"pods": "0"}},
    }
    assert kubectl.apply(quota).returncode == 0
    try:
        jobs.wait_until(lambda: "exceeded quota: no-pods" in try_pod(kubectl))
        name = jobs.create()
        message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.PODS_REFUSED)
    finally:
        kubectl("delete", "resourcequota", "no-pods")

    assert "exceeded quota: no-pods" in message


@pytest.fixture
def _is_restricted(kubectl: Any, jobs: Any) -> Iterator[None]:
    """Pod Security admission enforces the standard `restricted` in the namespace."""
    label = "pod-security.kubernetes.io/enforce"
    kubectl("label", "namespace", kubectl.namespace, f"{label}=restricted", "--overwrite")
    jobs.wait_until(lambda: "violates PodSecurity" in try_pod(kubectl))
    yield
    kubectl("label", "namespace", kubectl.namespace, f"{label}-")


ROOT = [{"name": "ray-worker", "securityContext": {"runAsUser": 0}}]


@pytest.mark.usefixtures("claim", "_is_restricted")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": {"hostNetwork": True}}, "host namespaces"),
        ({"network": {"rdma": {"resourceName": "rdma/hca", "count": 1}}}, "IPC_LOCK"),
        ({"podTemplate": {"spec": {"containers": ROOT}}}, "runAsUser=0"),
    ],
    ids=["hostNetwork", "RDMA", "podTemplate"],
)
def test_privileges_that_the_namespace_forbids_are_refused_in_the_api_servers_words(
    jobs: Any, changes: dict[str, Any], words: str
) -> None:
    name = jobs.create(pools=[pool("actor"), pool("critic", **changes)])

    def message_of(status: dict[str, Any]) -> str:
        conditions = {one["type"]: one["message"] for one in status.get("conditions", [])}
        return str(conditions.get(Condition.POOLS_READY, ""))

    # Not by its reason: the head's image does not exist, and a failed pull is the reason as soon as it is known.
    message = message_of(jobs.wait(name, lambda status: words in message_of(status), limit=240))

    assert 'violates PodSecurity "restricted:' in message


@pytest.mark.usefixtures("claim")
def test_the_operator_went_on_through_all_of_it(jobs: Any, operator: Any) -> None:
    assert operator.process.poll() is None
    assert operator.probe("healthz") == 200
    assert "bug in the operator" not in operator.log.read_text()
