"""A namespace with the operator, the storage and the real model; jobs are the first example with other numbers.

The operator is installed by its chart, limited to this namespace, with the image of this working tree.
"""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.trainer.fetch.hub_server import Hub, Repository, serving
from tools.cluster import operators, storage
from tools.cluster.command import run
from tools.cluster.demo import manifests
from tools.cluster.fixtures import RunningCluster, cluster, operator_image, trainer_image
from tools.cluster.layout import PROJECT
from tools.cluster.waiting import wait_until

__all__ = ["HUB_MODEL", "Site", "cluster", "hub", "operator_image", "site", "trainer_image"]

EXAMPLE = PROJECT / "examples" / "01-quickstart" / "ppojob.yaml"
CHART = PROJECT / "charts" / "ppojob"
MODEL_LIMIT_SECONDS = 600
PODS_LIMIT_SECONDS = 300.0
"""Until pods that are deleted have ended, on a busy machine."""
TERMINAL = ("Complete", "Failed")
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Name of the prepared model on the hub."""


@dataclass(frozen=True)
class Site:
    """The tests' namespace on the cluster, with everything that a job needs in it."""

    cluster: RunningCluster
    namespace: str
    folder: Path
    """The storage, as this host sees it."""
    trainer_image: str

    def kubectl(self, *arguments: str, limit: float = 180.0, stdin: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, limit=limit, stdin=stdin)

    def get(self, *arguments: str) -> Any:
        """`kubectl get` in the namespace, as parsed JSON."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def ppo(self, *arguments: str) -> str:
        """Run the kubectl plugin in the namespace, as a user's kubectl does."""
        command, environment = self._ppo(arguments)
        return run(command, limit=300, environment=environment)

    @contextmanager
    def ppo_until_left(self, *arguments: str) -> Iterator[None]:
        """Run the plugin meanwhile, and end it as Ctrl-C does."""
        command, environment = self._ppo(arguments)
        process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
        try:
            yield
        finally:
            # To kubectl too, as a terminal does.
            os.killpg(process.pid, signal.SIGINT)
            process.wait(PODS_LIMIT_SECONDS)

    def _ppo(self, arguments: Sequence[str]) -> tuple[list[str | Path], dict[str, str]]:
        path = f"{self.cluster.layout.bin}{os.pathsep}{os.environ['PATH']}"
        command: list[str | Path] = [Path(sys.executable).with_name("kubectl-ppo"), *arguments]
        return [*command, f"--namespace={self.namespace}"], {"KUBECONFIG": str(self.cluster.kubeconfig), "PATH": path}

    def apply(self, name: str, changes: dict[str, Any]) -> None:
        """Apply the first example under another name, with the trainer's image and the changes merged in."""
        job = yaml.safe_load(EXAMPLE.read_text())
        job["metadata"]["name"] = name
        job["spec"] = merged(job["spec"], {"image": self.trainer_image} | changes)
        self.kubectl("apply", "--filename=-", stdin=json.dumps(job))

    def job(self, name: str) -> Any:
        """The PPOJob as the API server has it."""
        return self.get("ppojob", name)

    def patch(self, name: str, **sections: Any) -> None:
        """Change sections of its spec."""
        self.kubectl("patch", "ppojob", name, "--type=merge", f"--patch={json.dumps({'spec': sections})}")

    def await_no_pods(self, name: str) -> None:
        """Wait until none of its pods is there."""

        def missing() -> str:
            pods = self.get("pods", f"--selector=ppojob.dev/job={name}")["items"]
            return f"pods {[pod['metadata']['name'] for pod in pods]}" if pods else ""

        wait_until(f"the pods of {name} to be gone", missing, limit=PODS_LIMIT_SECONDS, interval=1)

    def await_condition(self, name: str, kind: str, status: str, *, limit: float, reason: str = "") -> dict[str, str]:
        """Wait until a condition has the status (and the reason) and return it; another end fails at once."""
        found: dict[str, str] = {}

        def missing() -> str:
            nonlocal found
            conditions = {item["type"]: item for item in self.job(name).get("status", {}).get("conditions", [])}
            found = conditions.get(kind, {})
            if found.get("status") == status and reason in ("", found.get("reason")):
                return ""
            ended = [item for key, item in conditions.items() if key in TERMINAL and item["status"] == "True"]
            assert not ended, f"{name} ended otherwise: {ended}; {self.job(name)['status'].get('lastFailure')}"
            return f"{kind} of {name} is {found}"

        wait_until(f"{kind}={status} {reason} of {name}", missing, limit=limit, interval=1)
        return found

    def root(self, name: str) -> Path:
        """The job's own folder in the storage, as this host sees it."""
        return self.folder / "ppojob" / self.namespace / name

    def delete(self, name: str) -> None:
        """Delete the job and wait until its pods are gone."""
        self.kubectl("delete", "ppojob", name, "--timeout=300s", limit=330)

        def missing() -> str:
            pods = self.get("pods", f"--selector=ppojob.dev/job={name}")["items"]
            return f"pods {[pod['metadata']['name'] for pod in pods]}" if pods else ""

        wait_until(f"the pods of {name} to be gone", missing, limit=PODS_LIMIT_SECONDS, interval=1)


@pytest.fixture(scope="session")
def hub(site: Site) -> Iterator[Hub]:
    """A hub with the prepared model, which the pods reach at the node's address."""
    [node] = site.get("nodes")["items"]
    address = next(each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP")
    folder = site.folder / "models" / "smollm2-135m-instruct"
    with serving(address) as found:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        found.repositories["models", HUB_MODEL] = Repository(files)
        yield found


def merged(base: Any, changes: Any) -> Any:
    """`changes` over `base`: mappings by key, None removes a key, everything else is replaced."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return deepcopy(changes)
    result = {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}
    return {key: value for key, value in result.items() if value is not None}


@pytest.fixture(scope="session")
def site(cluster: RunningCluster, operator_image: str, trainer_image: str) -> Iterator[Site]:
    """The namespace, with operator, storage and model; taken away at the end."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    folder = storage.ensure_claim(cluster.layout, namespace=name)
    try:
        with operators.paused(cluster.kubectl):
            _install_operator(cluster, name, operator_image)
            _prepare_model(cluster, name, trainer_image)
            yield Site(cluster, name, folder, trainer_image)
    finally:
        # The jobs first: the operator needs no part in it, their children go by owner references.
        cluster.kubectl(f"--namespace={name}", "delete", "ppojobs", "--all", "--timeout=300s", limit=330)
        _helm(cluster, name, "uninstall", "ppojob", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        storage.release(cluster.layout, namespace=name)


def _install_operator(cluster: RunningCluster, namespace: str, image: str) -> None:
    repository, _, tag = image.rpartition(":")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={PROJECT / 'crds'}")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "watchNamespaces": f"{{{namespace}}}",
        # The definition is shared by everybody on this cluster, so no release of the tests owns it.
        "crds.install": "false",
        "resources.requests.cpu": "50m",
    }
    settings = [f"--set={key}={value}" for key, value in values.items()]
    _helm(cluster, namespace, "install", "ppojob", str(CHART), "--wait", "--timeout=400s", *settings)


def _helm(cluster: RunningCluster, namespace: str, *arguments: str) -> None:
    command: list[str | Path] = [cluster.layout.bin / "helm", f"--namespace={namespace}", *arguments]
    run(command, limit=480, environment={"KUBECONFIG": str(cluster.kubeconfig)})


def _prepare_model(cluster: RunningCluster, namespace: str, image: str) -> None:
    job = manifests.model_job(image)
    job["metadata"]["namespace"] = namespace
    cluster.kubectl("apply", "--filename=-", stdin=json.dumps(job))
    where = f"--namespace={namespace}"
    wait = ("wait", f"job/{manifests.MODEL_JOB}", "--for=condition=Complete", f"--timeout={MODEL_LIMIT_SECONDS}s")
    cluster.kubectl(where, *wait, limit=MODEL_LIMIT_SECONDS + 30)
