"""Two releases see the same jobs: each job is run by one of them, until it is handed over or that one is gone.

The first may do what the chart allows in one namespace; the second has the rights of one for all namespaces, and looks
at the first one's only.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import ANNOTATION_OPERATOR, Condition, Reason
from tests.integration.conftest import Kubectl
from tests.integration.operator.conftest import OperatorProcess, Rights, granted, render_chart
from tests.integration.operator.hiding_proxy import HidingProxy, Right

pytestmark = pytest.mark.usefixtures("volumes", "claim")

TIMES = {"PPOJOB_LEASE_DURATION": "15", "PPOJOB_LEASE_RENEW_DEADLINE": "10", "PPOJOB_LEASE_RETRY_PERIOD": "1"}
OFTEN = {"PPOJOB_IDLE_INTERVAL": "2", "PPOJOB_TAKE_OVER_AFTER": "60"}
OF_A_JOB = {"ppojob.dev", "ray.io", "networking.k8s.io"}


@pytest.fixture(scope="module")
def elsewhere(kubectl: Any, _alone: None) -> Iterator[Rights]:
    """What the chart gives an operator of another namespace that watches all."""
    there = Kubectl(f"test-{uuid.uuid4().hex[:8]}")
    there("create", "namespace", there.namespace)
    try:
        with granted(there, render_chart(there.namespace, "watchNamespaces=null")) as rights:
            rights.environment["PPOJOB_WATCH_NAMESPACES"] = kubectl.namespace
            yield rights
    finally:
        there("delete", "namespace", there.namespace, "--wait=false")


@dataclass
class Pair:
    """The two operators, and the second one's way to the API server."""

    first: OperatorProcess
    second: OperatorProcess
    proxy: HidingProxy


@pytest.fixture
def pair(rights: Rights, elsewhere: Rights, tmp_path: Any) -> Iterator[Pair]:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with elsewhere.proxy() as proxy:
        first = rights.operator(tmp_path / "first")
        second = elsewhere.operator_behind(proxy, tmp_path / "second")
        for process in (first, second):
            process.environment |= {**TIMES, **OFTEN}
            process.start()
        yield Pair(first, second, proxy)
        for process in (first, second):
            if process.process is not None and process.process.poll() is None:
                assert process.stop() == 0, process.log.read_text()


@pytest.fixture
def operator(pair: Pair) -> OperatorProcess:
    """Whose log is shown where a test fails."""
    return pair.second


def hand_over(kubectl: Any, name: str, namespace: str) -> None:
    """Do what a person does who hands a job over."""
    kubectl("annotate", "ppojob", name, f"{ANNOTATION_OPERATOR}={namespace}", "--overwrite")


def wait_for_owner(jobs: Any, name: str, rights: Rights) -> dict[str, Any]:
    """Wait until an operator has a job; return its status."""
    owner = rights.environment["POD_NAMESPACE"]
    status: dict[str, Any] = jobs.wait(name, lambda status: status.get("operator", {}).get("namespace") == owner)
    return status


def started_by_the_first(kubectl: Any, jobs: Any, pair: Pair, rights: Rights, **changes: Any) -> str:
    """Create a job that the first operator sees first."""
    pair.second.stop()
    name: str = jobs.create(**changes)
    wait_for_owner(jobs, name, rights)
    pair.second.start()
    return name


def clusters_of(kubectl: Any, name: str) -> list[str]:
    """Return the names of a job's RayClusters."""
    found = kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"]
    return [each["metadata"]["name"] for each in found]


def test_the_second_leaves_a_job_of_the_first_alone_and_says_so_once(
    kubectl: Any, jobs: Any, pair: Pair, rights: Rights
) -> None:
    # The job's status is idle: every write of it is by an operator.
    name = started_by_the_first(kubectl, jobs, pair, rights, storage={"claimName": "missing"})
    jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.STORAGE_MISSING)
    jobs.wait_until(lambda: pair.second.metric("ppojob_jobs_left_alone") == 1)
    pair.proxy.forget_used()
    before = kubectl.json("get", "ppojob", name, "--show-managed-fields")

    time.sleep(10)
    # It looks all the time.
    jobs.wait_until(lambda: Right("list", "ppojob.dev", "ppojobs") in pair.proxy.used)

    assert kubectl.json("get", "ppojob", name, "--show-managed-fields") == before
    assert [each for each in pair.proxy.used if each.group in OF_A_JOB and each.verb in ("patch", "delete")] == []
    event = jobs.event(name, Reason.OTHER_OPERATOR)
    assert (event["count"], event["type"]) == (1, "Warning")
    assert f"the job is run by the operator in namespace {kubectl.namespace} (ppojob-leader" in event["message"]
    assert pair.first.metric("ppojob_jobs_left_alone") == 0


def test_the_second_takes_a_job_over_when_the_first_is_gone_for_good(
    kubectl: Any, jobs: Any, pair: Pair, rights: Rights, elsewhere: Rights
) -> None:
    name = started_by_the_first(kubectl, jobs, pair, rights)
    jobs.wait(name, lambda status: "rayCluster" in status)
    [before] = clusters_of(kubectl, name)

    assert pair.first.stop() == 0
    wait_for_owner(jobs, name, elsewhere)

    kubectl("wait", "--for=delete", f"raycluster/{before}", "--timeout=240s")
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)
    status = jobs.status(name)
    assert [status["rayCluster"]["name"]] == clusters_of(kubectl, name)
    assert (status["attempt"], status["retries"]["total"]) == (1, 0)
    assert "has not been renewed for" in jobs.event(name, Reason.TAKEN_OVER)["message"]
    # Back again, the first one finds that the job is another's; it may not even ask whether that one lives.
    pair.first.start()
    jobs.wait_until(lambda: pair.first.metric("ppojob_jobs_left_alone") == 1)
    jobs.wait_until(lambda: "may not read the other's Lease" in pair.first.log.read_text())
    assert jobs.status(name)["operator"]["namespace"] == elsewhere.environment["POD_NAMESPACE"]


def test_the_annotation_hands_a_job_over_and_back(
    kubectl: Any, jobs: Any, pair: Pair, rights: Rights, elsewhere: Rights
) -> None:
    name = started_by_the_first(kubectl, jobs, pair, rights, runPolicy={"suspend": True})
    jobs.wait_for(name, Condition.SUSPENDED, "True", Reason.SUSPENDED)

    for owner in (elsewhere, rights):
        hand_over(kubectl, name, owner.environment["POD_NAMESPACE"])
        wait_for_owner(jobs, name, owner)
    kubectl("patch", "ppojob", name, "--type=merge", '--patch={"spec":{"runPolicy":{"suspend":false}}}')

    jobs.wait(name, lambda status: "rayCluster" in status)
    assert jobs.status(name)["operator"]["namespace"] == kubectl.namespace
    assert len(clusters_of(kubectl, name)) == 1
