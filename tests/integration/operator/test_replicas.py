"""Two real replicas on the real API server: one decides, both receive reports, and one of them may exit at any
moment."""

import contextlib
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import REPORT_PATH, progress_audience
from tests.integration.operator.hiding_proxy import HidingProxy

pytestmark = pytest.mark.usefixtures("volumes", "claim")

TIMES = {"PPOJOB_LEASE_DURATION": "24", "PPOJOB_LEASE_RENEW_DEADLINE": "20", "PPOJOB_LEASE_RETRY_PERIOD": "1"}
"""So long that a leader which a busy machine lets wait stays the leader."""
IS_STANDBY = "this replica is a standby now"
LEASES = "coordination.k8s.io"
ANSWER_SECONDS = 240.0
"""Until a replica has taken a report; its API server may be busy."""


@dataclass
class Replicas:
    """The two, and the way of each to the API server."""

    processes: list[Any]
    proxies: list[HidingProxy]

    def leader(self) -> int:
        """Wait until one leads and return which."""
        end = time.monotonic() + 240
        while len(leading := self.leading()) != 1:
            # They are asked one after the other, so one may follow the other meanwhile. Two leaders say so again.
            assert len(leading) < 2 or len(self.leading()) < 2, "both replicas lead"
            assert time.monotonic() < end, [process.log.read_text()[-2000:] for process in self.processes]
            time.sleep(0.1)
        return leading[0]

    def leading(self) -> list[int]:
        """Return those that say that they lead."""
        return [number for number, process in enumerate(self.processes) if process.leads()]


@pytest.fixture
def replicas(rights: Any, tmp_path: Any) -> Iterator[Replicas]:
    with contextlib.ExitStack() as stack:
        made = Replicas([], [])
        for number in range(2):
            proxy = stack.enter_context(rights.proxy(hidden=LEASES))
            proxy.is_hiding = False
            folder = tmp_path / f"replica-{number}"
            folder.mkdir()
            own = {"POD_NAME": f"replica-{number}", "PPOJOB_EXTRA_NAMES": "localhost"}
            process = rights.operator_behind(proxy, folder, **TIMES, **own)
            process.start()
            made.processes.append(process)
            made.proxies.append(proxy)
        yield made
        for process in made.processes:
            if process.process.poll() is None:
                assert process.stop() == 0, process.log.read_text()


@pytest.fixture
def operator(replicas: Replicas) -> Any:
    """Whose log is shown where a test fails."""
    return replicas.processes[0]


def test_the_other_one_takes_over_when_the_leader_is_killed(kubectl: Any, jobs: Any, replicas: Replicas) -> None:
    first = replicas.leader()
    before = jobs.create()
    jobs.wait(before, lambda status: "rayCluster" in status)
    jobs.event(before, Reason.VALID)

    between = jobs.create()
    replicas.processes[first].kill()
    after = jobs.create()

    assert replicas.leader() == 1 - first
    for name in (before, between, after):
        jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)
        jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)
        assert len(kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"]) == 1
    # The first one may have been killed between the status of the job `between` and its Event.
    jobs.event(after, Reason.VALID)
    lease = kubectl.json("get", "lease", "ppojob-leader")["spec"]
    assert lease["holderIdentity"].startswith(f"replica-{1 - first}_")


def test_a_leader_that_stops_gracefully_is_followed_without_waiting(jobs: Any, replicas: Replicas) -> None:
    first = replicas.leader()

    assert replicas.processes[first].stop() == 0

    assert "released the Lease" in replicas.processes[first].log.read_text()
    assert replicas.leader() == 1 - first
    jobs.wait_for(jobs.create(), Condition.ACCEPTED, "True", Reason.VALID)


def test_a_leader_that_cannot_renew_decides_nothing_though_it_could(jobs: Any, replicas: Replicas) -> None:
    first = replicas.leader()
    process, proxy = replicas.processes[first], replicas.proxies[first]
    losses = process.log.read_text().count(IS_STANDBY)
    proxy.is_hiding = True  # Its Lease only: everything else goes through.
    jobs.wait_until(lambda: process.log.read_text().count(IS_STANDBY) > losses)

    assert replicas.leader() == 1 - first
    # What the first one has sent before has arrived.
    proxy.forget_used()
    jobs.wait_for(jobs.create(), Condition.ACCEPTED, "True", Reason.VALID)

    assert {right for right in proxy.used if right.verb not in ("get", "list", "watch")} == set()
    assert (process.probe("healthz"), process.probe("readyz")) == (200, 200)
    proxy.is_hiding = False
    replicas.processes[1 - first].kill()
    assert replicas.leader() == first


def test_a_leader_that_is_cut_off_stands_by_when_it_comes_back(jobs: Any, replicas: Replicas) -> None:
    first = replicas.leader()
    replicas.proxies[first].cut()

    jobs.wait_until(replicas.processes[1 - first].leads)
    assert replicas.leader() == 1 - first
    replicas.proxies[first].restore()
    jobs.wait_until(lambda: f"standing by: replica-{1 - first}_" in replicas.processes[first].log.read_text())
    jobs.wait_for(jobs.create(), Condition.ACCEPTED, "True", Reason.VALID)

    assert replicas.leader() == 1 - first


@dataclass
class Sender:
    """A trainer that numbers its reports and sends each to the given replica."""

    kubectl: Any
    name: str
    uid: str
    token: str
    tls: ssl.SSLContext

    def send(self, process: Any, number: int) -> None:
        """Send the report of step `number`."""
        path = REPORT_PATH.format(namespace=self.kubectl.namespace, name=self.name)
        report = {"uid": self.uid, "attempt": 0, "number": number, "activity": "Training"}
        report |= {"step": number, "totalSteps": 99, "reward": number / 10}
        port = process.environment["PPOJOB_PORT"]
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = posted(self.tls, f"https://localhost:{port}{path}", report, headers)
        assert answer.status_code == 200, answer.text


def posted(tls: ssl.SSLContext, url: str, report: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """Send a report, as a trainer does: again, while the replica has no answer of the API server in time."""
    end = time.monotonic() + ANSWER_SECONDS
    with httpx.Client(verify=tls, trust_env=False, timeout=ANSWER_SECONDS) as client:
        while True:
            answer = client.post(url, json=report, headers=headers)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > end:
                return answer
            time.sleep(1)


def sender_of(kubectl: Any, name: str) -> Sender:
    """Return a sender with a token of the job's own head pod, as the kubelet would make it."""
    kubectl(
        "wait", "--for=create", "pods", "--selector", f"ppojob.dev/job={name},ray.io/node-type=head", "--timeout=240s"
    )
    [pod] = kubectl.json("get", "pods", "--selector", f"ppojob.dev/job={name},ray.io/node-type=head")["items"]
    uid = kubectl.json("get", "ppojob", name)["metadata"]["uid"]
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={pod['metadata']['name']}")
    audience = f"--audience={progress_audience(kubectl.namespace, name, uid)}"
    token = kubectl(
        "create", "token", f"{name}-trainer", audience, *bound, f"--bound-object-uid={pod['metadata']['uid']}"
    )
    authority = kubectl.json("get", "configmap", f"{name}-job")["data"][constants.CA_FILE]
    return Sender(kubectl, name, uid, token.strip(), ssl.create_default_context(cadata=authority))


def test_reports_reach_the_status_through_either_and_outlive_the_leader(
    kubectl: Any, jobs: Any, replicas: Replicas
) -> None:
    first = replicas.leader()
    leader, other = replicas.processes[first], replicas.processes[1 - first]
    name = jobs.create()
    sender = sender_of(kubectl, name)

    sender.send(leader, 1)
    sender.send(other, 2)
    jobs.wait(name, lambda status: status.get("progress", {}).get("step") == 2)
    sender.send(other, 3)  # Kept for the rest of its ten seconds.
    leader.kill()
    sender.send(other, 4)

    jobs.wait(name, lambda status: status["progress"]["step"] == 4)
    assert replicas.leader() == 1 - first
    assert jobs.status(name)["progress"]["report"] == 4


def test_a_report_that_one_replica_kept_never_overwrites_a_newer_one(
    kubectl: Any, jobs: Any, replicas: Replicas
) -> None:
    one, other = replicas.processes
    name = jobs.create()
    sender = sender_of(kubectl, name)

    sender.send(one, 1)
    jobs.wait(name, lambda status: status.get("progress", {}).get("step") == 1)
    sender.send(one, 2)  # Kept by the one, while the other has written nothing yet.
    sender.send(other, 3)
    jobs.wait(name, lambda status: status["progress"]["step"] == 3)
    written = 'ppojob_progress_status_writes_total{outcome="written"}'
    jobs.wait_until(lambda: one.metric(written) == 2)  # The one's time came.

    assert jobs.status(name)["progress"]["step"] == 3
    assert jobs.status(name)["progress"]["reward"] == "0.3"
