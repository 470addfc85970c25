"""The operator as a process of this machine, with the rights that the chart gives it, on the real API server."""

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.operator_scale.dashboards import Dashboards, serving
from tests.integration.conftest import wait_until_allowed
from tests.integration.operator.hiding_proxy import HidingProxy
from tests.ports import server_port
from tools.cluster import operators
from tools.cluster.kwok import TOLERATION, add_nodes, remove_nodes
from tools.cluster.layout import Layout

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
RELEASE = "ppojob"
_START_SECONDS = 240
_STOP_SECONDS = 240
_DASHBOARDS_SECONDS = 1500
_ANSWER_SECONDS = 30


@dataclass
class OperatorProcess:
    """`ppojob-operator` for one namespace; it can be stopped and started again."""

    environment: dict[str, str]
    log: Path
    probe_port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it watches."""
        command = [str(Path(sys.executable).with_name("ppojob-operator"))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + _START_SECONDS
        while not self.is_ready():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"not ready after {_START_SECONDS} s:\n{self.log.read_text()}"
            time.sleep(0.2)

    def is_ready(self) -> bool:
        """Ask its own probe."""
        return self.probe("readyz") == 200

    def probe(self, path: str) -> int:
        """Return the status of one of its probes; 0 if nobody answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.probe_port), timeout=_ANSWER_SECONDS) as connection:
                connection.sendall(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
                return int(connection.recv(64).split()[1])
        except (OSError, IndexError):
            return 0

    def metric(self, name: str) -> float:
        """Return the value of one of its metrics without labels."""
        url = f"http://127.0.0.1:{self.probe_port}/metrics"
        with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def leads(self) -> bool:
        """Whether it says that it leads; not if it does not answer."""
        try:
            return self.process is not None and self.process.poll() is None and self.metric("ppojob_leader") == 1
        except (OSError, HTTPException):
            return False

    def kill(self) -> None:
        """End it without a chance to do anything."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=_STOP_SECONDS)

    def stop(self) -> int:
        """Ask it to end, and return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=_STOP_SECONDS)


def render_chart(namespace: str, *more: str) -> list[dict[str, Any]]:
    """Return the chart's objects for one namespace, with more values."""
    values = ["crds.install=false", f"watchNamespaces={{{namespace}}}", "jobNetworkPolicy.enabled=true", *more]
    command = ["helm", "template", RELEASE, str(CHART), "--namespace", namespace, "--kube-version", "1.34.0"]
    done = subprocess.run(
        [*command, *(f"--set={value}" for value in values)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def environment_of(chart: list[dict[str, Any]]) -> dict[str, str]:
    """Return the environment that the chart gives the operator, without what only a pod knows."""
    (deployment,) = (manifest for manifest in chart if manifest["kind"] == "Deployment")
    variables = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    return {variable["name"]: variable["value"] for variable in variables if "value" in variable}


@dataclass
class Rights:
    """What the chart gives the operator in the module's namespace: an account and an environment."""

    kubeconfig: dict[str, Any]
    environment: dict[str, str]

    def proxy(self, hidden: str = "") -> HidingProxy:
        """Return a way to the API server that can be disturbed; it is not entered."""
        cluster = self.kubeconfig["clusters"][0]["cluster"]
        return HidingProxy(cluster["server"], base64.b64decode(cluster["certificate-authority-data"]).decode(), hidden)

    def operator_behind(self, proxy: HidingProxy, folder: Path, **environment: str) -> OperatorProcess:
        """Return an operator on that way, with more in its environment; it is not started."""
        kubeconfig = deepcopy(self.kubeconfig)
        kubeconfig["clusters"][0]["cluster"] = {"server": proxy.url}
        process = self.operator(folder, kubeconfig)
        process.environment |= environment
        return process

    def operator(self, folder: Path, kubeconfig: dict[str, Any] | None = None) -> OperatorProcess:
        """Return an operator that has these rights; it is not started."""
        probe_port = server_port()
        (folder / "kubeconfig").write_text(json.dumps(kubeconfig or self.kubeconfig))
        environment = {
            **self.environment,
            # PYTHONPATH: of a working tree that is not the installed one.
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            "HOME": str(folder),
            "KUBECONFIG": str(folder / "kubeconfig"),
            "PPOJOB_PORT": str(server_port()),
            "PPOJOB_PROBE_PORT": str(probe_port),
            "PPOJOB_WEBHOOK_PORT": str(server_port()),
            "PPOJOB_DASHBOARD_ACCESS": "PodIP",
            "PPOJOB_REQUEST_TIMEOUT": "5",
        }
        return OperatorProcess(environment, folder / "log", probe_port)


@pytest.fixture(scope="session")
def _alone(cluster: Any) -> Iterator[None]:
    """Nobody else looks at the tests' jobs."""
    with operators.paused(cluster):
        yield


@pytest.fixture(scope="module")
def chart_values() -> tuple[str, ...]:
    """More values of the chart, for a module that wants them."""
    return ()


@pytest.fixture(scope="module")
def rights(kubectl: Any, _alone: None, chart_values: tuple[str, ...]) -> Iterator[Rights]:
    """The chart's account, roles and Secrets, applied to the module's namespace."""
    with granted(kubectl, render_chart(kubectl.namespace, *chart_values)) as rights:
        yield rights


@contextmanager
def granted(kubectl: Any, chart: list[dict[str, Any]]) -> Iterator[Rights]:
    """Apply a rendered chart's account, roles and Secrets, which are of the namespace of `kubectl`."""
    wanted = [manifest for manifest in chart if manifest["kind"] not in ("Deployment", "Service", "Pod")]
    names = [f"{m['kind']}/{m['metadata']['name']}" for m in wanted if "namespace" not in m["metadata"]]
    try:
        done = kubectl.apply(*wanted)
        assert done.returncode == 0, done.stderr
        kubeconfig = json.loads(kubectl("config", "view", "--raw", "--minify", "--output=json"))
        kubeconfig["users"][0]["user"] = {"token": kubectl("create", "token", RELEASE, "--duration=2h").strip()}
        wait_until_allowed(kubectl)
        yield Rights(kubeconfig, {**environment_of(chart), "POD_NAMESPACE": kubectl.namespace})
    finally:
        kubectl("delete", "--ignore-not-found", *names)


@pytest.fixture(scope="module")
def operator(rights: Rights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The operator for the module's namespace; at the end it must stop gracefully."""
    process = rights.operator(tmp_path_factory.mktemp("operator"))
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


@dataclass
class Jobs:
    """PPOJobs of the module's namespace: made, looked at, waited for."""

    kubectl: Any
    log: Path
    made: list[str] = field(default_factory=list)

    def create(self, *, name: str = "", without: Collection[str] = (), **changes: Any) -> str:
        """Create a job that would fit on any node, with sections of its spec replaced or left out; return its name."""
        name = name or f"job-{uuid.uuid4().hex[:6]}"
        task = {"reasoningGym": {"task": "products"}}
        spec = {
            "image": "localhost:5000/ppojob/nothing:1",
            "device": "CPU",
            "model": {"actor": {"path": "/data/model"}},
            "data": {"train": task, "trainBatchSize": 16},
            "reward": {"function": {"module": "rewards"}},
            "actor": {"miniBatchSize": 8},
            "critic": {"miniBatchSize": 8},
            "head": {"resources": {"cpu": "10m", "memory": "10Mi"}},
            "pools": [pool("actor"), pool("critic")],
            "placement": {"actor": "actor", "critic": "critic"},
            "storage": {"claimName": "data"},
        }
        manifest = {
            "apiVersion": "ppojob.dev/v1alpha1",
            "kind": "PPOJob",
            "metadata": {"name": name, "namespace": self.kubectl.namespace},
            "spec": {key: value for key, value in {**spec, **changes}.items() if key not in without},
        }
        done = self.kubectl.apply(manifest)
        assert done.returncode == 0, done.stderr
        self.made.append(name)
        return name

    def status(self, name: str) -> dict[str, Any]:
        """Return a job's status."""
        found: dict[str, Any] = self.kubectl.json("get", "ppojob", name).get("status", {})
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Return one of a job's conditions, or nothing."""
        conditions = self.status(name).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def wait(self, name: str, is_so: Callable[[dict[str, Any]], bool], limit: float = 180) -> dict[str, Any]:
        """Return the status as soon as it is as asked; fail with status and log after `limit` seconds."""
        end = time.monotonic() + limit
        while not is_so(status := self.status(name)):
            assert time.monotonic() < end, f"{json.dumps(status, indent=1)}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.3)
        return status

    def event(self, name: str, reason: str, times: int = 1) -> dict[str, Any]:
        """Return a job's only Event of a reason once it has this count: it is written after the action that it
        reports."""
        found: list[dict[str, Any]] = []
        selector = f"involvedObject.name={name},reason={reason}"

        def is_told() -> bool:
            found[:] = self.kubectl.json("get", "events", "--field-selector", selector)["items"]
            return sum(event["count"] for event in found) >= times

        self.wait_until(is_told)
        [event] = found
        return event

    def wait_until(self, is_so: Callable[[], bool], limit: float = 180) -> None:
        """Wait until something is so; fail with the operator's log after `limit` seconds."""
        end = time.monotonic() + limit
        while not is_so():
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.3)

    def wait_for(self, name: str, kind: str, status: str, reason: str, limit: float = 180) -> str:
        """Wait until a condition has this status and reason; return the message that it had then."""

        def messages(found: dict[str, Any]) -> list[str]:
            return [
                str(each["message"])
                for each in found.get("conditions", [])
                if (each["type"], each["status"], each["reason"]) == (kind, status, reason)
            ]

        [message] = messages(self.wait(name, lambda found: bool(messages(found)), limit))
        return message


def pool(name: str, **fields: Any) -> dict[str, Any]:
    """Return a pool with one small worker."""
    small = {"cpu": "10m", "memory": "10Mi", "shm": "1Mi"}
    return {"name": name, "gpusPerNode": 1, "resourcesPerGPU": small, **fields}


@pytest.fixture
def jobs(kubectl: Any, operator: OperatorProcess) -> Iterator[Jobs]:
    """PPOJobs; those that a test made go with it."""
    made = Jobs(kubectl, operator.log)
    yield made
    if made.made:
        kubectl("delete", "ppojobs", *made.made, "--ignore-not-found", "--wait=false")


@pytest.fixture
def claim(kubectl: Any) -> None:
    """A claim that waits for its first pod, which is good enough for nodes that run none."""
    manifest = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": kubectl.namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": f"{kubectl.namespace}-data",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    done = kubectl.apply(_volume(kubectl.namespace), manifest)
    assert done.returncode == 0, done.stderr


def _volume(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-data"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": "/tmp"},
            "claimRef": {"namespace": namespace, "name": "data"},
        },
    }


@pytest.fixture(scope="module")
def volumes(kubectl: Any) -> Iterator[None]:
    """Whatever volume the module made goes with it."""
    yield
    kubectl("delete", "persistentvolume", f"{kubectl.namespace}-data", "--ignore-not-found", "--wait=false")


@dataclass(frozen=True)
class FakeNodes:
    """Nodes that exist only in the API server, in two kinds, and how pods get there."""

    prefix: str
    tolerations: tuple[dict[str, str], ...] = (TOLERATION,)

    def kind(self, name: str) -> dict[str, str]:
        """Return the node selector of a kind."""
        return {"gpu-type": f"{self.prefix}-{name}"}


@pytest.fixture(scope="module")
def fake_nodes(cluster: Any) -> Iterator[FakeNodes]:
    """Two nodes with 4 GPUs of kind h200 each, two with 2 GPUs of kind a100 each."""
    layout, nodes = Layout.from_environment(), FakeNodes(f"t{uuid.uuid4().hex[:6]}")
    kinds = {"h200": 4, "a100": 2}
    for kind, gpus in kinds.items():
        add_nodes(layout, 2, prefix=f"{nodes.prefix}-{kind}", labels=nodes.kind(kind), gpus=gpus)
    yield nodes
    for kind in kinds:
        remove_nodes(layout, prefix=f"{nodes.prefix}-{kind}")


@pytest.fixture(scope="module")
def dashboards() -> Iterator[Dashboards]:
    """Ray's dashboards of all fake heads: what is submitted there runs. One module at a time has them."""
    is_over = threading.Event()
    made: Future[Dashboards] = Future()

    async def serve() -> None:
        async with serving() as dashboards:
            made.set_result(dashboards)
            await asyncio.to_thread(is_over.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            if made.done():
                raise
            # Whoever waits for the server gets its error.
            made.set_exception(error)

    thread = threading.Thread(target=run, name="dashboards")
    thread.start()
    try:
        yield made.result(_DASHBOARDS_SECONDS)
    finally:
        is_over.set()
        thread.join(_STOP_SECONDS)
