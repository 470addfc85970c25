"""What is around the fleet, made and removed: a namespace with a claim, fake nodes, the operator's process.

The operator runs as a process of this machine, with the administrator's rights: what it does is measured, not what it
may. Operators that watch all namespaces are paused meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.samples import Sample

from tests.bench.operator_scale.connection import samples
from tools.cluster import kubernetes, kwok, operators
from tools.cluster.errors import ClusterError
from tools.cluster.layout import PROJECT, Layout

_PODS_PER_NODE = 400
_START_SECONDS = 120.0
_STOP_SECONDS = 60.0
_REMOVAL_SECONDS = 600.0
_LOOK_SECONDS = 0.1


@contextmanager
def place(layout: Layout, num_pods: int) -> Iterator[str]:
    """Return a new namespace with a claim, and fake nodes for so many pods; at the end all of it goes."""
    namespace = f"bench-{uuid.uuid4().hex[:6]}"
    with operators.paused(lambda *arguments: kubernetes.kubectl(layout, *arguments)):
        kubernetes.kubectl(layout, "apply", "--server-side", "--force-conflicts", f"--filename={PROJECT / 'crds'}")
        kubernetes.kubectl(layout, "create", "namespace", namespace)
        try:
            kubernetes.apply(layout, *_storage(namespace))
            kwok.add_nodes(layout, num_pods // _PODS_PER_NODE + 1, prefix=namespace)
            yield namespace
        finally:
            _remove(layout, namespace)


def _remove(layout: Layout, namespace: str) -> None:
    limit = f"--timeout={_REMOVAL_SECONDS:g}s"
    with suppress(ClusterError):
        kubernetes.kubectl(layout, "delete", "namespace", namespace, limit, limit=_REMOVAL_SECONDS + 10)
    kubernetes.kubectl(layout, "delete", "persistentvolume", f"{namespace}-data", "--ignore-not-found", "--wait=false")
    kwok.remove_nodes(layout, prefix=namespace)


def _storage(namespace: str) -> list[dict[str, object]]:
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        **common,
        "capacity": {"storage": "1Gi"},
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": "/tmp"},
        "claimRef": {"namespace": namespace, "name": "data"},
    }
    claim = {**common, "volumeName": f"{namespace}-data", "resources": {"requests": {"storage": "1Gi"}}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-data"},
            "spec": volume,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": namespace},
            "spec": claim,
        },
    ]


@dataclass
class OperatorProcess:
    """`ppojob-operator` for the fleet's namespace; it can be stopped and started again."""

    namespace: str
    log: Path
    port: int
    probe_port: int
    profile: Path | None = None
    """Where cProfile's figures go; None: it runs without."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process is not None
        return self.process.pid

    @property
    def url(self) -> str:
        """Where reports go."""
        return f"https://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            RuntimeError: it is not after a while.
        """
        environment = {
            **os.environ,
            "POD_NAMESPACE": self.namespace,
            "PPOJOB_WATCH_NAMESPACES": self.namespace,
            "PPOJOB_PORT": str(self.port),
            "PPOJOB_PROBE_PORT": str(self.probe_port),
            "PPOJOB_PUBLIC_URL": self.url,
            "PPOJOB_EXTRA_NAMES": "127.0.0.1",
            "PPOJOB_DASHBOARD_ACCESS": "PodIP",
        }
        profiler = ["-m", "cProfile", "-o", str(self.profile)] if self.profile else []
        command = [sys.executable, *profiler, "-m", "ppojob_operator.main"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + _START_SECONDS
        while not await self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the operator is not ready: see {self.log}\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self.process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    async def metrics(self, family: str) -> list[Sample]:
        """Return its own samples of a family."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.probe_port}/metrics") as answer,
        ):
            return samples(await answer.text(), family)

    async def _is_ready(self) -> bool:
        url = f"http://127.0.0.1:{self.probe_port}/readyz"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False
