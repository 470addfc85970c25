"""The chart with its real image in real pods: two replicas, `helm test`, a leader that is lost, a rolling upgrade."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.cluster import operators
from tools.cluster.images import build as images
from tools.cluster.images.recipes import OPERATOR
from tools.cluster.layout import Layout

pytestmark = pytest.mark.timeout(1800)

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
REPLICAS = "app.kubernetes.io/name=ppojob-operator"


def helm(namespace: str, *arguments: str) -> str:
    command = ["helm", f"--namespace={namespace}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout} {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def settings(kubectl: Any) -> list[str]:
    """The image of this working tree, in one namespace; the definition is shared and stays."""
    repository, _, tag = images.ensure(Layout.from_environment(), OPERATOR).name.rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "watchNamespaces": f"{{{kubectl.namespace}}}",
        "crds.install": "false",
        "resources.requests.cpu": "50m",
        "leaderElection.leaseDurationSeconds": "8",
        "leaderElection.renewDeadlineSeconds": "6",
        "leaderElection.retryPeriodSeconds": "1",
        "webhook.enabled": "true",
    }
    return [f"--set={name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def release(kubectl: Any, cluster: Any, settings: list[str]) -> Iterator[str]:
    with operators.paused(cluster):
        helm(kubectl.namespace, "install", "ppojob", str(CHART), "--wait", "--timeout=360s", *settings)
        yield "ppojob"
        helm(kubectl.namespace, "uninstall", "ppojob", "--ignore-not-found", "--wait")


def replicas(kubectl: Any) -> list[str]:
    """Return the names of the operator's pods that are not on their way out."""
    items = kubectl.json("get", "pods", f"--selector={REPLICAS}")["items"]
    return [item["metadata"]["name"] for item in items if "deletionTimestamp" not in item["metadata"]]


def live_leader(kubectl: Any) -> str:
    """Wait until a pod that stays leads, and return it."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = [leader(kubectl)]
        return found[0] in replicas(kubectl)

    wait_until(is_there)
    return found[0]


def leader(kubectl: Any) -> str:
    """Return the pod that leads, or nothing."""
    holder: str = kubectl.json("get", "lease", "ppojob-leader")["spec"].get("holderIdentity") or ""
    return holder.rpartition("_")[0]


def is_rolled_out(kubectl: Any) -> bool:
    done = kubectl.run("rollout", "status", "deployment/ppojob", "--watch=false")
    return "successfully rolled out" in done.stdout


def wait_until(is_so: Callable[[], bool], limit: float = 400) -> None:
    end = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.5)


def test_helm_test_says_that_all_is_well(kubectl: Any, release: str) -> None:
    said = helm(kubectl.namespace, "test", release, "--timeout=360s")

    assert "Phase:          Succeeded" in said


def test_both_replicas_take_reports_and_one_of_them_leads(kubectl: Any, release: str) -> None:
    def addressed() -> list[str]:
        slices = kubectl.json("get", "endpointslices", "--selector=kubernetes.io/service-name=ppojob")["items"]
        ready = [each for item in slices for each in item["endpoints"] or () if each["conditions"]["ready"]]
        return sorted(each["targetRef"]["name"] for each in ready)

    # The Service follows a pod's readiness with a delay.
    wait_until(lambda: len(addressed()) == 2 and addressed() == sorted(replicas(kubectl)))
    live_leader(kubectl)


def test_a_bad_job_is_refused_by_way_of_the_service(kubectl: Any, release: str, manifest: dict[str, Any]) -> None:
    manifest["metadata"] = {"name": "refused"}
    manifest["spec"]["head"] = {"podTemplate": {"spec": {"hostNetwork": True}}}
    refusal = 'webhook "ppojobs.ppojob.dev" denied the request: spec.head.podTemplate.spec.hostNetwork: True: use'

    def said() -> str:
        words: str = kubectl.run("create", "--dry-run=server", "--filename=-", stdin=json.dumps(manifest)).stderr
        return words

    wait_until(lambda: refusal in said())


def test_a_leader_whose_pod_is_killed_is_followed(kubectl: Any, release: str) -> None:
    first = live_leader(kubectl)

    kubectl("delete", "pod", first, "--force", "--grace-period=0")

    wait_until(lambda: leader(kubectl) not in ("", first))
    wait_until(lambda: is_rolled_out(kubectl))


def test_an_upgrade_never_leaves_the_service_without_a_replica(kubectl: Any, release: str, settings: list[str]) -> None:
    wait_until(lambda: is_rolled_out(kubectl))
    before = set(replicas(kubectl))
    helm(kubectl.namespace, "upgrade", release, str(CHART), *settings, "--set=logFormat=JSON")

    available: list[int] = []

    def is_over() -> bool:
        available.append(kubectl.json("get", "deployment", "ppojob")["status"].get("availableReplicas", 0))
        return is_rolled_out(kubectl)

    wait_until(is_over)
    # A probe may fail on a busy machine, so one of the two may be unavailable for other reasons than the upgrade.
    assert min(available) >= 1
    strategy = kubectl.json("get", "deployment", "ppojob")["spec"]["strategy"]
    assert strategy["rollingUpdate"]["maxUnavailable"] == 0
    assert not before & set(replicas(kubectl))
    log = kubectl("logs", live_leader(kubectl))
    assert all(json.loads(line)["level"] for line in log.splitlines())


def test_a_drain_takes_one_replica_at_a_time(kubectl: Any, release: str) -> None:
    wait_until(lambda: is_rolled_out(kubectl))
    wait_until(lambda: kubectl.json("get", "pdb", "ppojob")["status"]["disruptionsAllowed"] == 1)
    with no_new_pods(kubectl):
        first, other = replicas(kubectl)[:2]
        # A replica whose probe fails on a busy machine takes the place of the one that may be evicted, as a drain sees.
        wait_until(lambda: evict(kubectl, first).returncode == 0)
        second = evict(kubectl, other)

    assert second.returncode != 0
    assert "disruption budget" in second.stderr


@contextmanager
def no_new_pods(kubectl: Any) -> Iterator[None]:
    """Let the API server refuse new pods in the namespace: no replacement can be ready before the next command."""
    kubectl("create", "quota", "no-new-pods", "--hard=pods=0")
    try:
        wait_until(lambda: "hard" in kubectl.json("get", "quota", "no-new-pods").get("status", {}))
        yield
    finally:
        kubectl("delete", "quota", "no-new-pods")


def evict(kubectl: Any, name: str) -> subprocess.CompletedProcess[str]:
    """Ask the API server to evict a pod, as a drain does."""
    metadata = {"name": name, "namespace": kubectl.namespace}
    body = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}/eviction"
    done: subprocess.CompletedProcess[str] = kubectl.run("create", f"--raw={path}", "--filename=-", stdin=body)
    return done
