"""Many PPOJobs on nodes that exist only in the API server, and the times of each job's events.

    create --> API server --watches--> Times: created, applied (RayCluster), pods, ready (KubeRay), running, reported

Every time is of this process's clock, taken when a watch reports the change: other clocks and their whole seconds are
not used. The bench calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ppojob_api.v1alpha1 import constants
from tests.bench.operator_scale.connection import Connection
from tools.cluster.kwok import TOLERATION

Item = TypeVar("Item")
JOBS = f"/apis/{constants.API_VERSION}/namespaces/{{}}/{constants.PLURAL}"
CLUSTERS = "/apis/ray.io/v1/namespaces/{}/rayclusters"
PODS = "/api/v1/namespaces/{}/pods"
_AT_THE_SAME_TIME = 16
_LOOK_SECONDS = 0.2
_QUIET_SECONDS = 90.0
_HEAD_AND_CRITIC = 2


@dataclass
class Times:
    """When something was first seen, by the job's name, in seconds of the monotonic clock."""

    created: dict[str, float] = field(default_factory=dict)
    applied: dict[str, float] = field(default_factory=dict)
    """The operator's RayCluster is there."""
    pods: dict[str, float] = field(default_factory=dict)
    """KubeRay's first pod is there."""
    ready: dict[str, float] = field(default_factory=dict)
    """KubeRay says that all pods are ready."""
    running: dict[str, float] = field(default_factory=dict)
    """Its trainer was sent to Ray, and runs there."""
    reported: dict[str, float] = field(default_factory=dict)
    """The status shows the trainer's first report."""


@dataclass
class Fleet:
    """The jobs of one namespace."""

    connection: Connection
    namespace: str
    pods_per_job: int
    times: Times = field(default_factory=Times)
    uids: dict[str, str] = field(default_factory=dict)
    heads: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name and uid of each job's head pod."""
    pod_names: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Note what happens to the jobs."""
        watches = {JOBS: self._job, CLUSTERS: self._cluster, PODS: self._pod}
        tasks = [
            asyncio.create_task(self.connection.watch(path.format(self.namespace), heard))
            for path, heard in watches.items()
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, count: int) -> None:
        """Create jobs, as fast as the API server takes them."""

        async def one(number: int) -> None:
            name = f"job-{number:04}"
            made = await self.connection.call("POST", JOBS.format(self.namespace), manifest(name, self.pods_per_job))
            self.times.created.setdefault(name, time.monotonic())
            self.uids[name] = made["metadata"]["uid"]

        await concurrently(one, range(count))

    async def until(self, happened: dict[str, float], count: int, limit: float) -> int:
        """Wait until something happened to `count` jobs, or to none more for a while; return to how many it did."""
        end, newest, seen = time.monotonic() + limit, time.monotonic(), 0
        while len(happened) < count and time.monotonic() < min(end, newest + _QUIET_SECONDS):
            if len(happened) > seen:
                newest, seen = time.monotonic(), len(happened)
            await asyncio.sleep(_LOOK_SECONDS)
        return len(happened)

    def _job(self, kind: str, job: dict[str, Any]) -> None:
        name, status, now = job["metadata"]["name"], job.get("status", {}), time.monotonic()
        conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
        if conditions.get("Submitted") == "True":
            self.times.running.setdefault(name, now)
        if "progress" in status:
            self.times.reported.setdefault(name, now)

    def _cluster(self, kind: str, cluster: dict[str, Any]) -> None:
        name, now = cluster["metadata"]["labels"][constants.LABEL_JOB], time.monotonic()
        self.times.applied.setdefault(name, now)
        if cluster.get("status", {}).get("state") == "ready":
            self.times.ready.setdefault(name, now)

    def _pod(self, kind: str, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        name = metadata["labels"][constants.LABEL_JOB]
        self.times.pods.setdefault(name, time.monotonic())
        self.pod_names.add(metadata["name"])
        if metadata["labels"].get("ray.io/node-type") == "head":
            self.heads[name] = (metadata["name"], metadata["uid"])


async def concurrently(work: Callable[[Item], Awaitable[None]], items: Iterable[Item]) -> None:
    """Do something for each item, some at the same time; the first error ends it."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_THE_SAME_TIME):
            tasks.create_task(worker())


async def ticks(per_second: float, seconds: float) -> AsyncIterator[int]:
    """Count up at a rate; what came too late is caught up."""
    began = time.monotonic()
    for number in range(int(per_second * seconds)):
        with contextlib.suppress(ValueError):
            await asyncio.sleep(began + number / per_second - time.monotonic())
        yield number


def manifest(name: str, num_pods: int) -> dict[str, Any]:
    """Return a PPOJob with a head and `num_pods` - 1 workers, all of which fit on the nodes that are not there."""
    small = {"cpu": "10m", "memory": "10Mi"}
    place = {"nodeSelector": {"type": "kwok"}, "tolerations": [TOLERATION]}
    pool = {"gpusPerNode": 1, "resourcesPerGPU": {**small, "shm": "1Mi"}, **place}
    spec = {
        "image": "localhost:5000/ppojob/nothing:1",
        "device": "CPU",
        "model": {"actor": {"path": "/data/model"}},
        "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 720},
        "reward": {"function": {"module": "rewards"}},
        "actor": {"miniBatchSize": 720},
        "critic": {"miniBatchSize": 720},
        "head": {"resources": small, **place},
        "pools": [
            {"name": "actor", "nodes": max(1, num_pods - _HEAD_AND_CRITIC), **pool},
            {"name": "critic", "nodes": 1, **pool},
        ],
        "placement": {"actor": "actor", "critic": "critic"},
        "storage": {"claimName": "data"},
        # KubeRay is slower than the default with many of them.
        "runPolicy": {"startupDeadlineSeconds": 7200},
    }
    return {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": {"name": name}, "spec": spec}
