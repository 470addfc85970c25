"""Jobs one after the other while a part of the cluster or of the running job fails each minute (`make soak`).

Trainer, operator, KubeRay, scheduler and kubelet are real. All jobs complete, the operator never restarts, its memory
does not grow, its log has no traceback, and nothing is left of deleted jobs. `make soak SOAK_JOBS=24` takes about two
hours; with the default of `SOAK_JOBS` it is a short trial.
"""

import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.faults import ACTOR, CRITIC, HEAD, Injection, delete_pod, kill_component, send_signal
from tests.e2e.small_jobs import FEW_SAMPLES, records, small_pools
from tools.cluster import kuberay
from tools.cluster.errors import ClusterError

pytestmark = [pytest.mark.long, pytest.mark.timeout(14_400)]

NUM_JOBS = int(os.environ.get("SOAK_JOBS", "2"))
NUM_REPLICAS = 2  # of the operator, by the chart's default
STEPS = 4
FAULT_EVERY_SECONDS = 60.0
SAMPLE_EVERY_SECONDS = 20.0
JOB_LIMIT_SECONDS = 1200.0
OUTAGE_SECONDS = 10
GROWTH = 1.1
"""Most that the operator's memory may be in the last third of the time, as a share of that in the second."""
CHANGES: dict[str, Any] = {
    **FEW_SAMPLES,
    "pools": small_pools(),
    "trainer": {"totalSteps": STEPS, "validateEverySteps": 0},
    "checkpoint": {"everySteps": 1, "export": "Never", "keep": 1},
}
CLUSTER_FAULTS: dict[str, Injection] = {
    "API server killed": kill_component("kube-apiserver", OUTAGE_SECONDS),
    "KubeRay killed": kill_component(kuberay.PROCESS, OUTAGE_SECONDS),
    "scheduler killed": kill_component("kube-scheduler", OUTAGE_SECONDS),
    "controller manager killed": kill_component("kube-controller-manager", OUTAGE_SECONDS),
}
"""An attempt continues. One of them is injected each minute."""
JOB_FAULTS: dict[str, Injection] = {
    "critic's process killed": send_signal(CRITIC, r"^ray::WorkerProcess"),
    "actor's pod deleted": delete_pod(ACTOR),
    "engine's process killed": send_signal(ACTOR, r"^VLLM::EngineCore"),
    "critic's pod deleted": delete_pod(CRITIC),
    "head's pod deleted": delete_pod(HEAD),
}
"""An attempt ends. Each job has one of them, in the minute after its first step."""
MEMORY = """
import pathlib, re
found = [re.search(r"VmRSS:\\s+(\\d+)", each.read_text()) for each in pathlib.Path("/proc").glob("[0-9]*/status")]
print(max(int(each[1]) for each in found if each))
"""
"""Prints the memory of the container's largest process, in KiB."""
OPERATOR = "app.kubernetes.io/name=ppojob-operator"


@dataclass
class Soak:
    """What has happened."""

    phases: dict[str, str] = field(default_factory=dict)
    """Of each job at its end."""
    faults: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    """Of the larger of the operator's replicas, a value for each sample."""

    def thirds(self) -> list[float]:
        """Return the median of the operator's memory in each third of the time."""
        length = max(1, len(self.memory_mib) // 3)
        return [statistics.median(self.memory_mib[start : start + length]) for start in range(0, 3 * length, length)]


@dataclass
class Run:
    """One job: it is watched, and its faults are injected, until it has ended."""

    site: Site
    soak: Soak
    name: str
    job_fault: str
    cluster_faults: Iterator[str]
    has_job_fault: bool = False

    def until_it_ends(self) -> dict[str, Any]:
        """Return the status at its end; the last one that was read if that takes too long."""
        start = time.monotonic()
        next_fault, next_sample = start + FAULT_EVERY_SECONDS, start
        status: dict[str, Any] = {}
        while time.monotonic() < start + JOB_LIMIT_SECONDS:
            # The API server may be the part that has just failed.
            try:
                status = self.site.job(self.name).get("status", {})
                if status.get("phase") in ("Succeeded", "Failed"):
                    return status
                if time.monotonic() >= next_sample:
                    self.soak.memory_mib.append(operator_memory_mib(self.site))
                    next_sample = time.monotonic() + SAMPLE_EVERY_SECONDS
                if time.monotonic() >= next_fault:
                    next_fault = time.monotonic() + FAULT_EVERY_SECONDS
                    self._inject()
            except ClusterError as error:
                print(f"\n  {error}", end="", flush=True)
            time.sleep(2)
        return status

    def _inject(self) -> None:
        is_of_the_job = not self.has_job_fault and bool(records(self.site, self.name))
        what = self.job_fault if is_of_the_job else next(self.cluster_faults)
        (JOB_FAULTS if is_of_the_job else CLUSTER_FAULTS)[what](self.site, self.name)
        self.has_job_fault |= is_of_the_job
        self.soak.faults.append(what)


def replicas(site: Site) -> list[str]:
    """Return the names of the operator's pods; which of them leads may change while the API server is gone."""
    return [pod["metadata"]["name"] for pod in site.get("pods", f"--selector={OPERATOR}")["items"]]


def operator_memory_mib(site: Site) -> float:
    return max(int(site.kubectl("exec", name, "--", "python", "-c", MEMORY)) for name in replicas(site)) / 1024


@pytest.fixture(scope="module")
def soak(site: Site) -> Soak:
    found, faults = Soak(), itertools.cycle(CLUSTER_FAULTS)
    header = ("job", "phase", "seconds", "attempts", "retries", "MiB", "faults")
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}", end="", flush=True)
    for number, job_fault in zip(range(NUM_JOBS), itertools.cycle(JOB_FAULTS), strict=False):
        name, start, before = f"soak-{number}", time.monotonic(), len(found.faults)
        site.apply(name, CHANGES)
        status = Run(site, found, name, job_fault, faults).until_it_ends()
        found.phases[name] = status.get("phase", "unknown")
        retries = {kind: count for kind, count in status.get("retries", {}).items() if count}
        injected = ", ".join(found.faults[before:])
        memory, seconds = found.memory_mib[-1], time.monotonic() - start
        cells = (name, found.phases[name], f"{seconds:.0f}", status.get("attempt"), retries, f"{memory:.0f}", injected)
        print(f"\n| {' | '.join(map(str, cells))} |", end="", flush=True)
        site.delete(name)
        # A job's checkpoints stay when it is deleted: 24 of them would fill a small disk.
        shutil.rmtree(site.root(name))
    shown = ", ".join(f"{each:.0f}" for each in found.thirds())
    print(f"\n{len(found.faults)} faults; the operator's memory in each third of the time: {shown} MiB")
    return found


def test_every_job_completes(soak: Soak) -> None:
    assert soak.phases == {f"soak-{number}": "Succeeded" for number in range(NUM_JOBS)}


def test_faults_were_injected(soak: Soak) -> None:
    assert len(soak.faults) >= 2 * NUM_JOBS
    assert set(soak.faults) & set(JOB_FAULTS)


def test_the_operator_does_not_restart(site: Site, soak: Soak) -> None:
    pods = site.get("pods", f"--selector={OPERATOR}")["items"]

    # No replica was replaced either.
    assert [each["restartCount"] for pod in pods for each in pod["status"]["containerStatuses"]] == [0] * NUM_REPLICAS


def test_the_operators_log_has_no_traceback(site: Site, soak: Soak) -> None:
    log = "".join(site.kubectl("logs", name, "--tail=-1") for name in replicas(site))

    assert f"soak-{NUM_JOBS - 1}" in log, "no replica says what it did"
    assert "Traceback" not in log


def test_the_operators_memory_does_not_grow(soak: Soak) -> None:
    _, second, last = soak.thirds()

    assert last <= GROWTH * second


def test_nothing_is_left_of_deleted_jobs(site: Site, soak: Soak) -> None:
    kinds = "rayclusters,secrets,configmaps,networkpolicies,serviceaccounts,pods,services"
    left = [
        f"{item['kind']}/{item['metadata']['name']}"
        for item in json.loads(site.kubectl("get", kinds, "--output=json"))["items"]
        if "ppojob.dev/job" in item["metadata"].get("labels", {})
    ]

    assert left == []
