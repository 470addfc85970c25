"""The chart's ValidatingAdmissionPolicy on the real API server: the operator changes only what a PPOJob owns."""

import json
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.integration.chart.test_chart_in_a_cluster import CHART, COMMON, helm

Answer = Any

OWNER = {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "name": "products", "uid": "a-uid"}
POD = {"containers": [{"name": "main", "image": "none"}], "restartPolicy": "Never"}
OBJECTS: dict[str, dict[str, Any]] = {
    "ConfigMap": {"apiVersion": "v1", "data": {"a": "b"}},
    "ServiceAccount": {"apiVersion": "v1"},
    "Job": {"apiVersion": "batch/v1", "spec": {"suspend": True, "template": {"spec": POD}}},
    "NetworkPolicy": {"apiVersion": "networking.k8s.io/v1", "spec": {"podSelector": {}}},
    "RayCluster": {
        "apiVersion": "ray.io/v1",
        "spec": {"suspend": True, "headGroupSpec": {"rayStartParams": {}, "template": {"spec": POD}}},
    },
}
SECRET = {"apiVersion": "v1"}
DELETED = ("Job", "RayCluster", "Secret")
"""The kinds that the operator may delete."""
ACTIVE_SECONDS = 240.0


def manifest(kind: str, name: str, *, is_owned: bool) -> dict[str, Any]:
    metadata = {"name": name} | ({"ownerReferences": [OWNER]} if is_owned else {})
    return {"kind": kind, "metadata": metadata, **deepcopy(SECRET if kind == "Secret" else OBJECTS[kind])}


@pytest.fixture(scope="module")
def as_operator(kubectl: Any) -> Iterator[Callable[..., Answer]]:
    """Run kubectl with the account of a release, whose replicas are none; nothing is stored."""
    where = f"--namespace={kubectl.namespace}"
    helm("install", "ppojob", str(CHART), where, "--set=replicas=0", "--set=jobNetworkPolicy.enabled=true", *COMMON)
    account = f"--as=system:serviceaccount:{kubectl.namespace}:ppojob"

    def run(*arguments: str, stdin: str | None = None) -> Answer:
        return kubectl.run(*arguments, account, "--dry-run=server", stdin=stdin)

    deadline = time.monotonic() + ACTIVE_SECONDS
    probe = json.dumps(manifest("ConfigMap", "probe", is_owned=False))
    # Before the account has its rights, it is refused for another reason.
    while "may create only what a PPOJob owns" not in run("create", "--filename=-", stdin=probe).stderr:
        assert time.monotonic() < deadline, "the policy does not become active"
        time.sleep(0.5)
    yield run
    helm("uninstall", "ppojob", where)


@pytest.fixture
def of_somebody(kubectl: Any, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """An object that no PPOJob owns."""
    kind, name = request.param, f"somebodys-{request.param.lower()}"
    kubectl("create", "--filename=-", stdin=json.dumps(manifest(kind, name, is_owned=False)))
    yield kind, name
    kubectl("delete", kind, name, "--wait=false")


@pytest.mark.parametrize("kind", OBJECTS)
def test_only_owned_objects_are_created(as_operator: Callable[..., Answer], kind: str) -> None:
    owned, unowned = (
        as_operator("create", "--filename=-", stdin=json.dumps(manifest(kind, "new", is_owned=is_owned)))
        for is_owned in (True, False)
    )

    assert (owned.returncode, owned.stderr) == (0, "")
    assert unowned.returncode == 1
    assert "the operator may create only what a PPOJob owns" in unowned.stderr


@pytest.mark.parametrize("of_somebody", OBJECTS, indirect=True)
def test_an_object_of_somebody_else_cannot_be_changed(
    as_operator: Callable[..., Answer], of_somebody: tuple[str, str]
) -> None:
    kind, name = of_somebody

    patches = [{"labels": {"a": "b"}}, {"ownerReferences": [OWNER]}]
    done = [
        as_operator("patch", kind, name, "--type=merge", f"--patch={json.dumps({'metadata': patch})}")
        for patch in patches
    ]

    for each in done:
        assert each.returncode == 1
        assert "the operator may update only what a PPOJob owns" in each.stderr


@pytest.mark.parametrize("of_somebody", DELETED, indirect=True)
def test_an_object_of_somebody_else_cannot_be_deleted(
    as_operator: Callable[..., Answer], of_somebody: tuple[str, str]
) -> None:
    done = as_operator("delete", *of_somebody)

    assert done.returncode == 1
    assert "the operator may delete only what a PPOJob owns" in done.stderr


def test_pods_are_created_as_a_dry_run_alone(kubectl: Any, as_operator: Callable[..., Answer]) -> None:
    # As the namespaces of Ray's pods want it.
    container = {
        **POD["containers"][0],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "new", "ownerReferences": [OWNER]},
        "spec": {"containers": [container], "securityContext": security},
    }
    account = f"--as=system:serviceaccount:{kubectl.namespace}:ppojob"

    tried = as_operator("create", "--filename=-", stdin=json.dumps(pod))
    made = kubectl.run("create", "--filename=-", account, stdin=json.dumps(pod))

    assert (tried.returncode, tried.stderr) == (0, "")
    assert made.returncode == 1
    assert "the operator may create pods as a dry run alone" in made.stderr


def test_without_an_owner_secrets_are_created_in_the_operators_namespace_only(
    kubectl: Any, as_operator: Callable[..., Answer]
) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "new"}}

    own, other = (
        as_operator("create", f"--namespace={namespace}", "--filename=-", stdin=json.dumps(secret))
        for namespace in (kubectl.namespace, "default")
    )

    assert (own.returncode, own.stderr) == (0, "")
    assert "the operator may create only what a PPOJob owns, and secrets default/new" in other.stderr


@pytest.mark.parametrize("of_somebody", ["ConfigMap"], indirect=True)
def test_other_accounts_are_not_limited(
    kubectl: Any, as_operator: Callable[..., Answer], of_somebody: tuple[str, str]
) -> None:
    done = kubectl.run("label", *of_somebody, "a=b")

    assert done.returncode == 0
