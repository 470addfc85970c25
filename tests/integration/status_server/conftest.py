"""The status server with the rights that the chart gives the operator, on the real API server."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kubernetes.aio import client, config

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import REPORT_PATH, progress_audience
from ppojob_operator.api_server import ApiServer
from ppojob_operator.cluster_progress import ProgressCluster
from ppojob_operator.manifests import naming
from ppojob_operator.status_server import Health, OperatorMetrics, StatusServer, StatusServerSettings
from tests.integration.conftest import wait_until_allowed
from tests.ports import server_port
from tools.cluster.layout import Layout

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"
RELEASE = "ppojob"


def render(namespace: str, *values: str) -> list[dict[str, Any]]:
    """Return the chart's objects, without the definition of PPOJob."""
    settings = [f"--set={value}" for value in ("crds.install=false", *values)]
    command = ["helm", "template", RELEASE, str(CHART), "--namespace", namespace, "--kube-version", "1.34.0", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


@dataclass
class Operator:
    """The operator's account, with the rights of the chart."""

    namespace: str
    kubeconfig: dict[str, Any]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[client.ApiClient]:
        settings = client.Configuration()
        load = config.load_kube_config_from_dict
        await load(self.kubeconfig, client_configuration=settings)  # type: ignore[no-untyped-call]
        async with client.ApiClient(settings) as api:
            yield api


@pytest.fixture(scope="module")
def operator(kubectl: Any) -> Iterator[Operator]:
    """Everything of the chart but the Deployment, in the module's namespace, and a token of its account."""
    wanted = [
        manifest for manifest in render(kubectl.namespace) if manifest["kind"] not in ("Deployment", "Service", "Pod")
    ]
    done = kubectl.apply(*wanted)
    assert done.returncode == 0, done.stderr
    admin = json.loads(kubectl("config", "view", "--raw", "--minify", "--output=json"))
    admin["users"][0]["user"] = {"token": kubectl("create", "token", RELEASE).strip()}
    wait_until_allowed(kubectl)
    yield Operator(kubectl.namespace, admin)
    cluster_wide = [f"{m['kind']}/{m['metadata']['name']}" for m in wanted if m["kind"].startswith("ClusterRole")]
    kubectl("delete", *cluster_wide)


@dataclass
class Trainer:
    """A PPOJob with the service account and head pod that the operator would make, and its tokens."""

    kubectl: Any
    job: dict[str, Any]
    pod: dict[str, Any]
    account: str
    cluster: str

    @property
    def name(self) -> str:
        name: str = self.job["metadata"]["name"]
        return name

    @property
    def audience(self) -> str:
        return progress_audience(self.kubectl.namespace, self.name, self.job["metadata"]["uid"])

    def token(self, *, audience: str = "", account: str = "", is_bound: bool = True) -> str:
        """Ask the API server for a token, as the kubelet does for the pod's projected volume."""
        arguments = ["create", "token", account or self.account, f"--audience={audience or self.audience}"]
        if is_bound:
            metadata = self.pod["metadata"]
            arguments += ["--bound-object-kind=Pod", f"--bound-object-name={metadata['name']}"]
            arguments += [f"--bound-object-uid={metadata['uid']}"]
        token: str = self.kubectl(*arguments)
        return token.strip()

    def report(self, **changes: Any) -> dict[str, Any]:
        """Return a report in the middle of the run."""
        return {
            "uid": self.job["metadata"]["uid"],
            "attempt": 0,
            "activity": "Training",
            "step": 6,
            "totalSteps": 8,
            "etaSeconds": 20,
            "reward": 0.412345,
            "metrics": {"critic/score/mean": 0.412345},
            "pools": [{"name": "actor", "busyFraction": 0.91}],
            **changes,
        }

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.kubectl.json("get", "ppojob", self.name).get("status", {})
        return status

    def set_status(self, **status: Any) -> None:
        """Write the operator's part of the status, by its field manager."""
        patch = yaml.safe_dump(
            {
                "apiVersion": constants.API_VERSION,
                "kind": constants.KIND,
                "metadata": {"name": self.name},
                "status": {"rayCluster": {"name": self.cluster}, **status},
            }
        )
        manager = f"--field-manager={constants.FIELD_MANAGER_OPERATOR}"
        self.kubectl("apply", "--server-side", "--subresource=status", manager, "--filename=-", stdin=patch)


@pytest.fixture
def make_trainer(kubectl: Any, manifest: dict[str, Any]) -> Callable[..., Trainer]:
    """Return a function that makes a job with its service account and pod."""

    def make(*, labels: dict[str, str] | None = None, is_current: bool = True) -> Trainer:
        name = f"job-{uuid.uuid4().hex[:8]}"
        account = naming.service_account_name(name)
        job = kubectl.create({**manifest, "metadata": {"name": name}})
        kubectl("create", "serviceaccount", account)
        cluster = kubectl.create(_ray_cluster(f"{name}-ray"))["metadata"]
        own = {constants.LABEL_JOB: name, constants.LABEL_RAY_CLUSTER: cluster["name"]}
        owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": cluster["name"], "uid": cluster["uid"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-head",
                "labels": own if labels is None else labels,
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {
                "serviceAccountName": account,
                "nodeSelector": {"no": "such-node"},
                "containers": [{"name": "ray-head", "image": "none"}],
            },
        }
        trainer = Trainer(kubectl, job, kubectl.create(pod), account, cluster["name"] if is_current else "another")
        trainer.set_status()
        return trainer

    return make


def _ray_cluster(name: str) -> dict[str, Any]:
    """Return a RayCluster that KubeRay leaves alone, so that its only pod is the test's."""
    template = {"spec": {"containers": [{"name": "ray-head", "image": "none"}]}}
    head = {"rayStartParams": {}, "template": template}
    spec = {"managedBy": "kueue.x-k8s.io/multikueue", "headGroupSpec": head}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def trainer(make_trainer: Callable[..., Trainer]) -> Trainer:
    return make_trainer()


@dataclass
class Running:
    """A status server that runs."""

    server: StatusServer
    metrics: OperatorMetrics
    port: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, trainer: Trainer, token: str, body: Any = None, **changes: Any) -> tuple[int, Any]:
        """Send a report as the trainer does and return status and answer."""
        path = REPORT_PATH.format(namespace=trainer.kubectl.namespace, name=trainer.name)
        data = json.dumps(trainer.report(**changes)) if body is None else body
        tls = ssl.create_default_context(cadata=self.server.ca_bundle())
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
            session.post(f"https://localhost:{self.port}{path}", data=data, ssl=tls) as answer,
        ):
            return answer.status, await answer.json()

    def count(self, outcome: str) -> float:
        """Return the number of status writes with that outcome."""
        sample = self.metrics.registry.get_sample_value("ppojob_progress_status_writes_total", {"outcome": outcome})
        return sample or 0.0


Serve = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def serve(operator: Operator) -> Serve:
    """Return a context manager that runs a status server with the operator's account."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[Running]:
        async with operator.connect() as api:
            running = _make(ProgressCluster(ApiServer(api, timeout=30.0)), operator.namespace, settings)
            await running.server.prepare()
            task = asyncio.create_task(running.server.run(running.stop))
            try:
                await _until_open(running.port, task)
                yield running
            finally:
                running.stop.set()
                await task

    return serve


def _make(port: ProgressCluster, namespace: str, settings: dict[str, Any]) -> Running:
    given = StatusServerSettings(
        namespace=namespace,
        service_name=RELEASE,
        certificate_secret=f"{RELEASE}-certificates",
        host="127.0.0.1",
        port=server_port(),
        probe_port=server_port(),
        extra_names=("localhost",),
        **{"write_interval_seconds": 1.0, "token_cache_seconds": 5.0, **settings},
    )
    metrics = OperatorMetrics()
    server = StatusServer(
        given,
        port=port,
        secrets=port,
        service_account_name=naming.service_account_name,
        fetch_job_name=naming.fetch_job_name,
        health=Health(),
        metrics=metrics,
    )
    return Running(server, metrics, given.port)


async def _until_open(port: int, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(240):
        while not task.done():
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)
    task.result()


@pytest.fixture(scope="session")
def signing_key(cluster: Any) -> bytes:
    """The key with which the one-node cluster's API server signs tokens."""
    layout = Layout.from_environment()
    file = layout.certificates / "service-account.key"
    if not file.exists() or os.environ["KUBECONFIG"] != str(layout.kubeconfig):
        pytest.skip("the key that signs tokens is known of the tests' own cluster only")
    return file.read_bytes()
