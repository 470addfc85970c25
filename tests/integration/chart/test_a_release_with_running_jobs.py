"""What happens to jobs when their release is upgraded or goes: an operator runs, and KubeRay has made their pods."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Reason
from tests.integration.conftest import define, wait_until_allowed, wait_until_served
from tests.integration.operator.conftest import Jobs, OperatorProcess, Rights, claim, environment_of, volumes
from tools.cluster import operators

__all__ = ["claim", "volumes"]
pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("volumes", "claim")]

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
DEFINITIONS = CHART.parents[1] / "crds"
NAME = "ppojob"
OF_A_JOB = "ppojobs,rayclusters,configmaps,serviceaccounts,secrets,networkpolicies,pods,services"
REST_SECONDS = 8.0
DELETED_SECONDS, SETTLED_SECONDS = 180.0, 240.0


def helm(namespace: str, *arguments: str) -> str:
    command = ["helm", f"--namespace={namespace}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def values(kubectl: Any, **more: str) -> list[str]:
    """Return the values of a release whose pods sleep: its operators are processes of this machine."""
    watched = f"{{{kubectl.namespace}}}"
    given = {"replicas": "0", "watchNamespaces": watched, "jobNetworkPolicy.enabled": "true", **more}
    return [f"--set={name}={value}" for name, value in given.items()]


def operator_of(kubectl: Any, folder: Path) -> OperatorProcess:
    """Return an operator as the release's pods would be: with its account and its environment."""
    folder.mkdir()
    kubeconfig = json.loads(kubectl("config", "view", "--raw", "--minify", "--output=json"))
    kubeconfig["users"][0]["user"] = {"token": kubectl("create", "token", NAME, "--duration=1h").strip()}
    wait_until_allowed(kubectl)
    environment = environment_of([kubectl.json("get", "deployment", NAME)])
    process = Rights(kubeconfig, {**environment, "POD_NAMESPACE": kubectl.namespace}).operator(folder)
    # It looks at each job often, also without a cause.
    process.environment |= {"PPOJOB_IDLE_INTERVAL": "2", "POD_NAME": folder.name}
    return process


def objects_of(kubectl: Any, job: str) -> dict[str, tuple[str, int]]:
    """Return uid and generation of the job and of everything that belongs to it."""
    found = kubectl.json("get", OF_A_JOB, f"--selector=ppojob.dev/job={job}")["items"]
    found.append(kubectl.json("get", "ppojob", job))
    return {
        f"{each['kind']}/{each['metadata']['name']}": (each["metadata"]["uid"], each["metadata"].get("generation", 0))
        for each in found
    }


def edit(kubectl: Any, jobs: Jobs, job: str, cluster: str) -> None:
    """Edit a RayCluster by hand and wait until it is as it was: the next operator compares what was edited once."""
    head = "/spec/headGroupSpec/template/spec/containers/0/env"
    before = kubectl.json("get", "raycluster", cluster)["spec"]
    patch = [
        {"op": "replace", "path": "/spec/authOptions/mode", "value": "disabled"},
        {"op": "replace", "path": head, "value": []},
        {"op": "remove", "path": "/spec/workerGroupSpecs/0/template/spec/tolerations"},
    ]
    kubectl("patch", "raycluster", cluster, "--type=json", f"--patch={json.dumps(patch)}")
    jobs.wait_until(lambda: kubectl.json("get", "raycluster", cluster)["spec"] == before)
    said = jobs.event(job, Reason.CLUSTER_RESTORED)
    assert said["count"] == 1
    for words in (
        "authOptions.mode was disabled",
        "env[RAY_USAGE_STATS_ENABLED] was removed",
        "tolerations was removed",
    ):
        assert words in said["message"]


def settled_objects_of(kubectl: Any, job: str) -> dict[str, tuple[str, int]]:
    """Wait until nobody changes the objects of a job for a while, and return them."""
    end, found = time.monotonic() + SETTLED_SECONDS, objects_of(kubectl, job)
    while True:
        time.sleep(REST_SECONDS)
        before, found = found, objects_of(kubectl, job)
        if found == before:
            return found
        assert time.monotonic() < end, (before, found)


def replaced(before: OperatorProcess, after: OperatorProcess, jobs: Jobs) -> OperatorProcess:
    """Start the next operator as the Deployment does it, before the other one goes, and let it look at the jobs."""
    after.start()
    assert before.stop() == 0, before.log.read_text()
    jobs.wait_until(after.leads)
    time.sleep(REST_SECONDS)
    return after


@pytest.fixture
def _alone(cluster: Any) -> Iterator[None]:
    with operators.paused(cluster):
        yield


@pytest.mark.usefixtures("_alone")
def test_an_upgrade_and_a_rollback_under_an_operator_that_runs_leave_jobs_and_their_clusters_alone(
    kubectl: Any, tmp_path: Path
) -> None:
    helm(kubectl.namespace, "install", NAME, str(CHART), *values(kubectl, **{"crds.install": "false"}))
    old = operator_of(kubectl, tmp_path / "old")
    old.start()
    jobs = Jobs(kubectl, old.log)
    job = jobs.create()
    cluster = jobs.wait(job, lambda status: "rayCluster" in status)["rayCluster"]["name"]
    jobs.wait_until(lambda: sum(each.startswith("Pod/") for each in objects_of(kubectl, job)) == 3)
    edit(kubectl, jobs, job, cluster)
    before = settled_objects_of(kubectl, job)

    more = {"crds.install": "false", "logFormat": "JSON", "logLevel": "DEBUG"}
    helm(kubectl.namespace, "upgrade", NAME, str(CHART), *values(kubectl, **more))
    new = replaced(old, operator_of(kubectl, tmp_path / "new"), jobs)
    upgraded = objects_of(kubectl, job)
    # The page's command, but for the names.
    helm(kubectl.namespace, "rollback", NAME, "--wait")
    back = replaced(new, operator_of(kubectl, tmp_path / "back"), jobs)
    after, status = objects_of(kubectl, job), jobs.status(job)
    logs = [new.log.read_text(), back.log.read_text()]
    assert back.stop() == 0, logs[1]
    helm(kubectl.namespace, "uninstall", NAME, "--wait")
    left = objects_of(kubectl, job)

    # Made, edited, restored: and then nobody wrote it again.
    assert before[f"RayCluster/{cluster}"][1] == 3
    assert before == upgraded == after
    assert (status["attempt"], status["rayCluster"]["name"]) == (0, cluster)
    assert "lastFailure" not in status
    assert all(json.loads(line)["level"] for line in logs[0].splitlines())
    assert not logs[1].startswith("{"), "the rollback restored the release's values"
    assert Reason.CLUSTER_RESTORED not in "".join(logs)
    # The operator goes, and what trains goes on.
    assert left == before
    kubectl("delete", "ppojob", job)


def ppojobs(cluster: Any) -> str:
    """Return the names of the PPOJobs of all namespaces."""
    return str(cluster("get", "ppojobs", "--all-namespaces", "--output=name")).strip()


@pytest.fixture
def definition_to_lose(kubectl: Any, cluster: Any, _alone: None) -> Iterator[None]:
    """Neither CRD nor policy, as before the first installation; the tests' own are back at the end."""
    deadline = time.monotonic() + DELETED_SECONDS
    # Jobs of other tests, and of their namespaces, may be about to go.
    while (left := ppojobs(cluster)) and time.monotonic() < deadline:
        time.sleep(1)
    if left:
        pytest.skip("there are PPOJobs in this cluster, which would go with their definition")
    cluster("delete", "--timeout=240s", f"--filename={DEFINITIONS}")
    yield
    define(cluster)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "gone"])
def test_the_definition_and_its_jobs_go_with_the_release_by_choice(
    kubectl: Any, definition_to_lose: None, manifest: dict[str, Any], keep: bool
) -> None:
    helm(kubectl.namespace, "install", NAME, str(CHART), *values(kubectl, **{"crds.keep": str(keep).lower()}))
    wait_until_served(kubectl)
    created = kubectl.create({**manifest, "metadata": {"name": "one"}})

    helm(kubectl.namespace, "uninstall", NAME, "--wait")

    if keep:
        assert kubectl.json("get", "ppojob", "one")["metadata"]["uid"] == created["metadata"]["uid"]
        kubectl("delete", "ppojob", "one")
    else:
        kubectl("wait", "--for=delete", "crd/ppojobs.ppojob.dev", "--timeout=240s")
        assert "(NotFound)" in kubectl.run("get", "crd", "ppojobs.ppojob.dev").stderr
