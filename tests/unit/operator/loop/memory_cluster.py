"""An API server in memory, and a loop over it, for the tests of the loop."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from ppojob_api.v1alpha1.template_reference import TemplateRef
from ppojob_operator.adoption import own_identity
from ppojob_operator.loop import Hooks, Loop
from ppojob_operator.notifications import Notifier
from ppojob_operator.plan import EventRecord, Job, JobKey, Manifest, Ray, Submission, Surroundings
from ppojob_operator.settings import DashboardAccess, Settings

GOOD, BAD = JobKey("ns", "good"), JobKey("ns", "bad")
SPEC = {
    "image": "trainer:1",
    "model": {"actor": {"path": "/data/model"}},
    "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
    "reward": {"function": {"module": "rewards"}},
    "pools": [{"name": "actor", "gpusPerNode": 2}],
    "placement": {"actor": "actor"},
    "storage": {"claimName": "data"},
}
SELECTOR = {"matchLabels": {"ppojob.dev/enabled": "true"}}


OURS = own_identity(Settings())


class MemoryCluster:
    """An API server in memory: what was applied is there, and errors are raised by the calls that they are set for."""

    def __init__(self, *keys: JobKey) -> None:
        self.jobs = {key: job_of(key) for key in keys}
        self.applied: list[str] = []
        self.events: list[str] = []
        self.deleted: list[str] = []
        self.workloads: list[Manifest] | None = []
        self.errors: dict[tuple[str, JobKey], Exception] = {}
        self.calls: list[tuple[str, JobKey]] = []
        self.in_look: set[JobKey] = set()
        self.clusters: dict[JobKey, list[Manifest]] = {}
        self.pods: dict[JobKey, list[Manifest]] = {}
        self.secrets: set[str] = set()
        self.fetch_jobs: dict[JobKey, Manifest] = {}
        self.configs: dict[JobKey, Mapping[str, str]] = {}
        self.templates: dict[tuple[str, str], Manifest] = {}
        """By kind and name."""

    def _call(self, name: str, key: JobKey) -> None:
        self.calls.append((name, key))
        if error := self.errors.get((name, key)):
            raise error

    async def read_job(self, key: JobKey) -> Manifest | None:
        self._call("read_job", key)
        await asyncio.sleep(0)
        return self.jobs.get(key)

    async def list_jobs(self, namespace: str) -> list[Manifest]:
        self._call("list_jobs", JobKey(namespace, ""))
        return [job for key, job in self.jobs.items() if namespace in ("", key.namespace)]

    async def list_clusters(self, key: JobKey) -> list[Manifest] | None:
        return self.clusters.get(key, [])

    async def list_workloads(self, key: JobKey, owners: Collection[str]) -> list[Manifest] | None:
        self._call("list_workloads", key)
        return self.workloads

    async def list_pods(self, key: JobKey) -> list[Manifest]:
        self._call("list_pods", key)
        return self.pods.get(key, [])

    async def read_fetch_job(self, key: JobKey) -> Manifest | None:
        self._call("read_fetch_job", key)
        return self.fetch_jobs.get(key)

    async def delete_fetch_job(self, key: JobKey) -> None:
        self.deleted.append(f"{key.name}-fetch")

    async def read_claim(self, namespace: str, name: str) -> Manifest | None:
        return {"metadata": {"name": name}, "status": {"phase": "Bound"}}

    async def read_config(self, key: JobKey) -> Mapping[str, str] | None:
        return self.configs.get(key)

    async def read_template(self, ref: TemplateRef, namespace: str) -> Manifest | None:
        self._call("read_template", JobKey(namespace, ref.name))
        return self.templates.get((ref.kind.value, ref.name))

    async def apply(self, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        key = JobKey(metadata["namespace"], metadata["labels"]["ppojob.dev/job"])
        self._call("apply", key)
        self.applied.append(manifest["kind"])
        if manifest["kind"] == "Secret":
            self.secrets.add(metadata["name"])
        if manifest["kind"] == "ConfigMap":
            self.configs[key] = manifest["data"]
        if manifest["kind"] == "Job":
            self.fetch_jobs[key] = manifest
        if manifest["kind"] == "RayCluster":
            self.clusters[key] = [manifest]

    async def write_status(self, job: Job, status: Mapping[str, Any]) -> bool:
        self._call("write_status", job.key)
        if job.key not in self.jobs:
            return False
        self.jobs[job.key]["status"] = dict(status)
        return True

    async def delete_cluster(self, namespace: str, name: str) -> None:
        self.deleted.append(name)

    async def delete_secret(self, namespace: str, name: str) -> None:
        self._call("delete_secret", JobKey(namespace, name))
        self.secrets.discard(name)

    async def delete_job(self, job: Job) -> None:
        self.deleted.append(job.key.name)

    async def emit(self, job: Job, event: EventRecord) -> None:
        if error := self.errors.get(("emit", job.key)):
            raise error
        self.events.append(event.reason)

    def verdict(self, key: JobKey, kind: str) -> tuple[str, str]:
        """Return reason and message of a condition."""
        found = next(each for each in self.jobs[key]["status"]["conditions"] if each["type"] == kind)
        return found["reason"], found["message"]


class LabelledCluster(MemoryCluster):
    """An API server with namespaces, of which some have the label."""

    def __init__(self, *keys: JobKey, labelled: str = "") -> None:
        super().__init__(*keys)
        self.labelled = set(labelled)

    async def list_namespaces(self, selector: str) -> list[str]:
        self._call("list_namespaces", JobKey("", selector))
        return sorted(self.labelled)


class SilentDashboard:
    """A dashboard that nobody has to ask in these tests."""

    async def look(self, address: object) -> Ray:
        return Ray()

    async def submit(self, address: object, submission: Submission) -> None:
        raise AssertionError("not in these tests")


def job_of(key: JobKey) -> dict[str, Any]:
    metadata = {"namespace": key.namespace, "name": key.name, "uid": f"uid-{key.name}", "generation": 1}
    return {"metadata": metadata, "spec": SPEC}


def make_loop(cluster: MemoryCluster, notifier: Notifier | None = None, **settings: Any) -> Loop:
    """Return a loop over the API server in memory."""
    configured = Settings(dashboard_access=DashboardAccess.SERVICE, **settings)
    surroundings = Surroundings("https://operator", "PEM", b"k" * 32)
    return Loop(configured, cluster, SilentDashboard(), lambda key: surroundings, Hooks(), notifier)  # type: ignore[arg-type]


async def run_for(loop: Loop, seconds: float) -> None:
    """Run the loop for a while."""
    stop = asyncio.Event()
    running = asyncio.create_task(loop.run(stop))
    await asyncio.sleep(seconds)
    stop.set()
    await asyncio.wait_for(running, 60)
