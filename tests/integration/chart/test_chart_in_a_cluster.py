"""The chart on the real API server: its objects are taken, its pod is restricted, upgrades and goodbyes are clean."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
# The definition is shared by all tests of this cluster, so the release does not own it here.
COMMON = ("--set=crds.install=false",)


def helm(*arguments: str) -> str:
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def render(namespace: str, *values: str) -> list[dict[str, Any]]:
    text = helm("template", "ppojob", str(CHART), f"--namespace={namespace}", "--kube-version=1.34.0", *values)
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


@pytest.fixture
def release(kubectl: Any) -> Iterator[str]:
    """A release that sleeps, because its image is not in the cluster."""
    name = "ppojob"
    where = f"--namespace={kubectl.namespace}"
    notes = helm("install", name, str(CHART), where, "--set=replicas=0", *COMMON)
    yield notes
    helm("uninstall", name, where, "--ignore-not-found")


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("--set=watchNamespace={namespace}",),
        ("--set=certificates.existingSecret=given", "--set=networkPolicy.enabled=true"),
        ("--set=serviceAccount.create=false", "--set=priorityClassName=system-cluster-critical"),
    ],
    ids=" ".join,
)
def test_the_api_server_takes_every_object_without_a_warning(kubectl: Any, values: tuple[str, ...]) -> None:
    given = [value.format(namespace=kubectl.namespace) for value in values]
    text = yaml.safe_dump_all(render(kubectl.namespace, *COMMON, *given))

    done = kubectl.run("create", "--dry-run=server", "--validate=strict", "--filename=-", stdin=text)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_api_server_takes_the_charts_definition(kubectl: Any) -> None:
    objects = render(kubectl.namespace)
    [definition] = [manifest for manifest in objects if manifest["kind"] == "CustomResourceDefinition"]
    arguments = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--filename=-")

    done = kubectl.run(*arguments, stdin=yaml.safe_dump(definition))

    assert done.returncode == 0, done.stderr


def test_the_pod_passes_the_restricted_pod_security_standard(kubectl: Any) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    kubectl("create", "serviceaccount", "ppojob")
    [deployment] = [m for m in render(kubectl.namespace) if m["kind"] == "Deployment"]
    pod = {"apiVersion": "v1", "kind": "Pod", **deployment["spec"]["template"]}
    pod["metadata"]["name"] = "operator"

    done = kubectl.run("create", "--dry-run=server", "--filename=-", stdin=json.dumps(pod))
    kubectl("delete", "serviceaccount", "ppojob")

    assert done.returncode == 0, done.stderr


def test_the_notes_name_the_next_commands(kubectl: Any, release: str) -> None:
    for command in (
        f"kubectl -n {kubectl.namespace} rollout status deployment/ppojob",
        "kubectl get ppojobs --watch",
        "kubectl describe ppojob NAME",
        "kubectl get crd rayclusters.ray.io",
    ):
        assert command in release
    assert "It sleeps (replicas: 0)" in release


def test_an_upgrade_leaves_what_the_operator_stored_alone(kubectl: Any, release: str) -> None:
    data = {"tls.key": base64.b64encode(b"made by the operator").decode()}
    kubectl("patch", "secret", "ppojob-certificates", "--type=merge", f"--patch={json.dumps({'data': data})}")

    where = f"--namespace={kubectl.namespace}"
    helm("upgrade", "ppojob", str(CHART), where, "--set=replicas=0", "--set=logLevel=DEBUG", *COMMON)

    assert kubectl.json("get", "secret", "ppojob-certificates")["data"] == data
    environment = kubectl.json("get", "deployment", "ppojob")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PPOJOB_LOG_LEVEL", "value": "DEBUG"} in environment


def test_nothing_stays_after_uninstalling_but_the_definition(kubectl: Any, release: str) -> None:
    helm("uninstall", "ppojob", f"--namespace={kubectl.namespace}", "--wait")

    label = "--selector=app.kubernetes.io/instance=ppojob"
    kinds = "deployments,services,secrets,serviceaccounts,roles,rolebindings"
    assert kubectl("get", kinds, label, "--output=name") == ""
    assert kubectl.namespace not in kubectl("get", "clusterroles,clusterrolebindings", "--output=name")
    assert kubectl("get", "crd", "ppojobs.ppojob.dev", "--output=name")


def test_in_one_namespace_the_account_may_act_there_and_nowhere_else(kubectl: Any) -> None:
    where = f"--namespace={kubectl.namespace}"
    helm("install", "one", str(CHART), where, "--set=replicas=0", f"--set=watchNamespace={kubectl.namespace}", *COMMON)
    account = f"--as=system:serviceaccount:{kubectl.namespace}:one-ppojob"
    rights = [("create", "rayclusters.ray.io"), ("list", "ppojobs"), ("get", "pods"), ("create", "secrets")]

    here = [kubectl.run("auth", "can-i", *right, account).stdout.strip() for right in rights]
    there = [kubectl.run("auth", "can-i", *right, account, "-n", "default").stdout.strip() for right in rights]
    review = kubectl.run("auth", "can-i", "create", "tokenreviews.authentication.k8s.io", account).stdout.strip()
    helm("uninstall", "one", where)

    assert here == ["yes"] * len(rights)
    assert there == ["no"] * len(rights)
    assert review == "yes"
