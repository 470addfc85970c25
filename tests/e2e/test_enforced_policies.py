"""The NetworkPolicies of jobs on a network that enforces them (kube-router's firewall): who reaches which pods.

The first connections are made before policies are enforced, so it is known that later ones could succeed.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.e2e.conftest import Site
from tests.e2e.small_jobs import FEW_SAMPLES, await_step, records, small_pools
from tools.cluster.kube_router import enforced

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

NAME = "guarded"
CHANGES = {
    **FEW_SAMPLES,
    "pools": small_pools(),
    "trainer": {"totalSteps": 1000, "validateEverySteps": 0},
    "checkpoint": {"everySteps": 0, "export": "Never"},
}
DASHBOARD_PORT, GCS_PORT = 8265, 6379
STRANGER, OTHER_JOB = "stranger", "pod-of-another-job"
OPERATOR = "app.kubernetes.io/name=ppojob-operator"
LISTENING = """
import pathlib
ports = set()
for file in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in pathlib.Path(file).read_text().splitlines()[1:]:
        address, port = line.split()[1].split(":")
        if line.split()[3] == "0A" and address != "0100007F" and not address.endswith("01000000"):
            ports.add(int(port, 16))
print(*sorted(ports))
"""
"""Prints the TCP ports on which a container listens for other hosts."""
CONNECT = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def is_open(target):
    try:
        socket.create_connection(target, timeout=5).close()
    except OSError:
        return False
    return True
targets = [(address, int(port)) for address, port in (each.split(":") for each in sys.argv[1:])]
with ThreadPoolExecutor(16) as pool:
    print(*(f"{address}:{port}" for (address, port), found in zip(targets, pool.map(is_open, targets)) if found))
"""
"""Prints those of the addresses that accept a connection."""


@dataclass
class Story:
    """Addresses by their pod, and what could be reached, by who tried."""

    targets: Mapping[str, list[str]]
    before: Mapping[str, Collection[str]] = field(default_factory=dict)
    enforced: Mapping[str, Collection[str]] = field(default_factory=dict)
    steps: int = 0
    """That were done while policies were enforced."""

    @property
    def all_targets(self) -> list[str]:
        return [target for targets in self.targets.values() for target in targets]


@pytest.fixture(scope="module")
def story(site: Site, operator_image: str) -> Iterator[Story]:
    site.apply(NAME, CHANGES)
    with strangers(site, operator_image):
        last = 1
        await_step(site, NAME, last)
        found = Story(targets_of(site))
        found.before = reached(site, found.all_targets)
        with enforced(site.cluster.layout):
            found.enforced = reached(site, found.all_targets)
            last = max(records(site, NAME))
            # The second of them began after the rules were there.
            await_step(site, NAME, last + 2)
            site.patch(NAME, trainer={"totalSteps": last + 3})
            site.await_condition(NAME, "Complete", "True", limit=600)
            found.steps = max(records(site, NAME)) - last
        yield found
    site.delete(NAME)


@contextmanager
def strangers(site: Site, image: str) -> Iterator[None]:
    """Two pods that are not the job's, one of which has the label of another job."""
    for name, labels in ((STRANGER, "role=stranger"), (OTHER_JOB, "ppojob.dev/job=another")):
        site.kubectl("run", name, f"--image={image}", f"--labels={labels}", "--command", "--", "sleep", "86400")
    try:
        for name in (STRANGER, OTHER_JOB):
            site.kubectl("wait", "pod", name, "--for=condition=Ready", "--timeout=120s", limit=150)
        yield
    finally:
        site.kubectl("delete", "pod", STRANGER, OTHER_JOB, "--ignore-not-found", "--force", "--grace-period=0")


def targets_of(site: Site) -> dict[str, list[str]]:
    """Return the addresses on which the job's pods listen."""
    pods = site.get("pods", f"--selector=ppojob.dev/job={NAME}")["items"]
    found = {}
    for pod in pods:
        name, address = pod["metadata"]["name"], pod["status"]["podIP"]
        ports = site.kubectl("exec", name, "--", "python", "-c", LISTENING).split()
        found[name] = [f"{address}:{port}" for port in ports]
    return found


def reached(site: Site, targets: Collection[str]) -> dict[str, list[str]]:
    """Return which of the addresses accept connections of the strangers, the operator and the job's own head."""
    operator = site.get("pods", f"--selector={OPERATOR}")["items"][0]["metadata"]["name"]
    head = site.get("pods", f"--selector=ppojob.dev/job={NAME},ray.io/node-type=head")["items"][0]["metadata"]["name"]
    callers = {STRANGER: STRANGER, OTHER_JOB: OTHER_JOB, "operator": operator, "head": head}
    return {
        name: site.kubectl("exec", pod, "--", "python", "-c", CONNECT, *targets, limit=300).split()
        for name, pod in callers.items()
    }


def ports(addresses: Collection[str]) -> set[int]:
    return {int(address.rpartition(":")[2]) for address in addresses}


def test_every_pod_of_the_job_listens_and_could_be_reached(story: Story) -> None:
    assert len(story.targets) == 3
    for targets in story.targets.values():
        assert targets
    for caller in (STRANGER, OTHER_JOB, "operator"):
        assert {DASHBOARD_PORT, GCS_PORT} <= ports(story.before[caller]), json.dumps(story.before)


@pytest.mark.parametrize("caller", [STRANGER, OTHER_JOB])
def test_other_pods_reach_none_of_its_ports(story: Story, caller: str) -> None:
    assert story.enforced[caller] == []


def test_the_operator_reaches_the_dashboard_alone(story: Story) -> None:
    assert ports(story.enforced["operator"]) == {DASHBOARD_PORT}
    assert len(story.enforced["operator"]) == 1


def test_the_jobs_own_pods_reach_each_other(story: Story) -> None:
    # Workers of Ray may end between two tries, with their ports.
    lost = set(story.before["head"]) - set(story.enforced["head"])
    assert len(lost) < len(story.before["head"]) / 4, lost


def test_the_job_continues_and_completes(story: Story) -> None:
    assert story.steps == 3
