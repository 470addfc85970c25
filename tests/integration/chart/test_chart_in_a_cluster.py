"""The chart on the real API server: its objects are taken, its pod is restricted, upgrades and goodbyes are clean."""

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import define, delete_policy
from tools.cluster import operators

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
PREVIOUS = Path(__file__).with_name("previous") / "ppojob-0.1.0.tgz"
KNOWN_SECONDS = 240.0
"""Until the API server follows new roles, and another definition."""
# The definition is shared by all tests of this cluster, so the release does not own it here.
COMMON = ("--set=crds.install=false",)


def helm(*arguments: str) -> str:
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=400, check=False)
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
        ("--set=watchNamespaces={{{namespace}}}",),
        ("--set=certificates.existingSecret=given", "--set=networkPolicy.enabled=true"),
        (
            "--set=webhook.enabled=true",
            "--set=networkPolicy.enabled=true",
            "--set=networkPolicy.webhookFrom[0].ipBlock.cidr=10.0.0.1/32",
        ),
        ("--set=jobNetworkPolicy.enabled=true", "--set=metrics.dashboards.enabled=true"),
        ("--set=serviceAccount.create=false", "--set=priorityClassName=system-cluster-critical"),
    ],
    ids=" ".join,
)
def test_the_api_server_takes_every_object_without_a_warning(kubectl: Any, values: tuple[str, ...]) -> None:
    given = [value.format(namespace=kubectl.namespace) for value in values]
    # A pod is refused before its service account is there; `helm test` runs this one.
    objects = [manifest for manifest in render(kubectl.namespace, *COMMON, *given) if manifest["kind"] != "Pod"]
    text = yaml.safe_dump_all(objects)

    done = kubectl.run("create", "--dry-run=server", "--validate=strict", "--filename=-", stdin=text)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_api_server_takes_the_charts_definitions(kubectl: Any) -> None:
    objects = render(kubectl.namespace)
    definitions = [manifest for manifest in objects if manifest["kind"] == "CustomResourceDefinition"]
    arguments = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--filename=-")

    done = kubectl.run(*arguments, stdin=yaml.safe_dump_all(definitions))

    assert len(definitions) == 3
    assert done.returncode == 0, done.stderr


def test_the_pod_passes_the_restricted_pod_security_standard(kubectl: Any) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    kubectl("create", "serviceaccount", "ppojob")
    objects = render(kubectl.namespace)
    [deployment], [test] = ([m for m in objects if m["kind"] == kind] for kind in ("Deployment", "Pod"))
    pod = {"apiVersion": "v1", "kind": "Pod", **deployment["spec"]["template"]}
    pod["metadata"]["name"] = "operator"

    done = [kubectl.run("create", "--dry-run=server", "--filename=-", stdin=json.dumps(each)) for each in (pod, test)]
    kubectl("delete", "serviceaccount", "ppojob")

    assert [(each.returncode, each.stderr) for each in done] == [(0, ""), (0, "")]


def test_the_notes_name_the_next_commands(kubectl: Any, release: str) -> None:
    for command in (
        f"kubectl -n {kubectl.namespace} rollout status deployment/ppojob",
        "kubectl get ppojobs --watch",
        "kubectl describe ppojob NAME",
        "kubectl get crd rayclusters.ray.io",
    ):
        assert command in release
    assert "It is paused (replicas: 0)" in release


def test_an_upgrade_leaves_what_the_operator_stored_alone(kubectl: Any, release: str) -> None:
    data = {"tls.key": base64.b64encode(b"made by the operator").decode()}
    kubectl("patch", "secret", "ppojob-certificates", "--type=merge", f"--patch={json.dumps({'data': data})}")

    where = f"--namespace={kubectl.namespace}"
    helm("upgrade", "ppojob", str(CHART), where, "--set=replicas=0", "--set=logLevel=DEBUG", *COMMON)

    assert kubectl.json("get", "secret", "ppojob-certificates")["data"] == data
    environment = kubectl.json("get", "deployment", "ppojob")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PPOJOB_LOG_LEVEL", "value": "DEBUG"} in environment


def test_an_upgrade_leaves_the_webhook_trusted(kubectl: Any, cluster: Any) -> None:
    where, name = f"--namespace={kubectl.namespace}", f"{kubectl.namespace}-trusted-ppojob"
    watched = f"--set=watchNamespaces={{{kubectl.namespace}}}"
    settings = ("--set=replicas=0", "--set=webhook.enabled=true", watched, *COMMON)
    bundle = cluster.json("config", "view", "--raw", "--minify")["clusters"][0]["cluster"]["certificate-authority-data"]
    patch = json.dumps([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}])
    try:
        helm("install", "trusted", str(CHART), where, *settings)
        kubectl("patch", "validatingwebhookconfiguration", name, "--type=json", f"--patch={patch}")
        helm("upgrade", "trusted", str(CHART), where, *settings, "--set=webhook.timeoutSeconds=7")
        [webhook] = kubectl.json("get", "validatingwebhookconfiguration", name)["webhooks"]
    finally:
        helm("uninstall", "trusted", where, "--ignore-not-found")

    assert (webhook["timeoutSeconds"], webhook["clientConfig"]["caBundle"]) == (7, bundle)


@pytest.fixture
def previous_definition(kubectl: Any, cluster: Any) -> Iterator[None]:
    """The CRD as the chart before this one has it, without policy and operator; the newest are back at the end."""
    [old] = [m for m in render_package(kubectl.namespace) if m["kind"] == "CustomResourceDefinition"]
    with operators.paused(cluster):
        delete_policy(cluster)
        kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=yaml.safe_dump(old))
        yield
        define(cluster)


def render_package(namespace: str) -> list[dict[str, Any]]:
    text = helm("template", "ppojob", str(PREVIOUS), f"--namespace={namespace}", "--kube-version=1.34.0")
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def with_old_names(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the job as the definition before this one has it: CHANGELOG.md lists the fields that were renamed."""
    spec = deepcopy(manifest["spec"])
    spec["device"] = spec["device"].lower()
    spec["storage"]["persistentVolumeClaim"] = spec["storage"].pop("claimName")
    for role in ("rollout", "ref", "reward"):
        [spec["placement"][role]] = spec["placement"][role]
    for name in ("train", "validation"):
        spec["data"][name]["type"] = "ReasoningGym"
    return {**manifest, "metadata": {"name": "running"}, "spec": spec}


def create_once_known(kubectl: Any, manifest: dict[str, Any]) -> None:
    """Create a job of another definition: until the API server follows that, it refuses the names of the fields."""
    deadline, text = time.monotonic() + KNOWN_SECONDS, json.dumps(manifest)
    while (done := kubectl.run("create", "--dry-run=server", "--filename=-", stdin=text)).returncode:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)
    kubectl.create(manifest)


def lost(before: Any, after: Any, path: str = "spec") -> list[str]:
    """Return the paths of the values that are others now, or gone."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [] if before == after else [path]
    return [found for key, value in before.items() for found in lost(value, after.get(key), f"{path}.{key}")]


@pytest.fixture
def previous_release(kubectl: Any, previous_definition: None) -> Iterator[tuple[str, ...]]:
    """A release of the chart before this one; the arguments of its installation."""
    where = f"--namespace={kubectl.namespace}"
    settings = (where, "--set=replicas=0", *COMMON)
    helm("install", "ppojob", str(PREVIOUS), *settings)
    yield settings
    helm("uninstall", "ppojob", where, "--wait")


def test_an_upgrade_from_the_chart_before_touches_no_running_job(
    kubectl: Any, previous_release: tuple[str, ...], manifest: dict[str, Any]
) -> None:
    create_once_known(kubectl, with_old_names(manifest))
    status = {"phase": "Running", "attempt": 1, "progress": {"step": 3, "totalSteps": 8}, "ready": "3/3"}
    patch = f"--patch={json.dumps({'status': status})}"
    kubectl("patch", "ppojob", "running", "--subresource=status", "--type=merge", patch)
    before = kubectl.json("get", "ppojob", "running", "--show-managed-fields")

    define(kubectl)
    helm("upgrade", "ppojob", str(CHART), *previous_release)
    first = kubectl.json("get", "deployment", "ppojob")["spec"]["strategy"]["type"]
    helm("upgrade", "ppojob", str(CHART), *previous_release)
    second = kubectl.json("get", "deployment", "ppojob")["spec"]["strategy"]["type"]
    after = kubectl.json("get", "ppojob", "running", "--show-managed-fields")

    # Nothing was written. Fields that were renamed or removed are not shown any more.
    assert after["metadata"] == before["metadata"]
    assert after["status"] == before["status"]
    assert sorted(lost(before["spec"], after["spec"])) == [
        "spec.data.train.type",
        "spec.data.validation.type",
        "spec.runPolicy.infrastructureBackoffLimit",
        "spec.storage.persistentVolumeClaim",
    ]
    # The operator of the chart before knows no Lease: its pod must be gone before the new one decides.
    assert (first, second) == ("Recreate", "RollingUpdate")


def test_nothing_stays_after_uninstalling_but_the_definition(kubectl: Any, release: str) -> None:
    helm("uninstall", "ppojob", f"--namespace={kubectl.namespace}", "--wait")

    label = "--selector=app.kubernetes.io/instance=ppojob"
    kinds = "deployments,services,secrets,serviceaccounts,roles,rolebindings"
    assert kubectl("get", kinds, label, "--output=name") == ""
    assert kubectl.namespace not in kubectl("get", "clusterroles,clusterrolebindings", "--output=name")
    assert kubectl("get", "crd", "ppojobs.ppojob.dev", "--output=name")


def test_in_one_namespace_the_account_may_act_there_and_nowhere_else(kubectl: Any) -> None:
    where = f"--namespace={kubectl.namespace}"
    watched = f"--set=watchNamespaces={{{kubectl.namespace}}}"
    helm("install", "one", str(CHART), where, "--set=replicas=0", watched, *COMMON)
    account = f"--as=system:serviceaccount:{kubectl.namespace}:one-ppojob"
    rights = [("create", "rayclusters.ray.io"), ("list", "ppojobs"), ("get", "pods"), ("create", "secrets")]
    review = ("create", "tokenreviews.authentication.k8s.io")

    def answers() -> list[str]:
        return [kubectl.run("auth", "can-i", *right, account).stdout.strip() for right in [*rights, review]]

    # The API server knows new roles with a delay.
    deadline = time.monotonic() + KNOWN_SECONDS
    while (here := answers()) != ["yes"] * (len(rights) + 1) and time.monotonic() < deadline:
        time.sleep(0.5)
    there = [kubectl.run("auth", "can-i", *right, account, "-n", "default").stdout.strip() for right in rights]
    helm("uninstall", "one", where)

    assert here == ["yes"] * (len(rights) + 1)
    assert there == ["no"] * len(rights)
