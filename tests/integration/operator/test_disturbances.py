"""The API server goes away, throttles, refuses a race, a watch falls silent: nothing is missed, and it is noticed."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.hiding_proxy import HidingProxy

pytestmark = pytest.mark.usefixtures("volumes", "claim")

LEADS, IS_STANDBY = "leading as", "this replica is a standby now"
"""What the operator logs at the start and at the loss of its term."""
MISSED_SECONDS = 30.0
"""After a job was created: several times what the operator needs to notice that no watch reports it."""
TIMES = {"PPOJOB_LEASE_DURATION": "6", "PPOJOB_LEASE_RENEW_DEADLINE": "4", "PPOJOB_LEASE_RETRY_PERIOD": "1"}


@pytest.fixture(scope="module")
def proxy(rights: Any) -> Iterator[HidingProxy]:
    with rights.proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def operator(rights: Any, proxy: HidingProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An operator that looks at all jobs every few seconds, so that a silent watch is noticed soon."""
    folder = tmp_path_factory.mktemp("operator")
    process = rights.operator_behind(proxy, folder, **TIMES, PPOJOB_IDLE_INTERVAL="4")
    process.start()
    yield process
    proxy.restore()
    assert process.stop() == 0, process.log.read_text()


@pytest.fixture(autouse=True)
def _mended(proxy: HidingProxy) -> Iterator[None]:
    yield
    proxy.restore()


def test_changes_during_an_outage_of_the_api_server_are_seen_afterwards(
    kubectl: Any, jobs: Any, operator: Any, proxy: HidingProxy
) -> None:
    changed, deleted = jobs.create(), jobs.create()
    for name in (changed, deleted):
        jobs.wait(name, lambda status: "rayCluster" in status)
    # On a busy machine, it may have lost the Lease before.
    jobs.wait_until(operator.leads)
    log = operator.log.read_text()
    terms, losses = log.count(LEADS), log.count(IS_STANDBY)

    proxy.cut()
    jobs.wait_until(lambda: operator.log.read_text().count(IS_STANDBY) > losses)
    made = jobs.create()
    kubectl("patch", "ppojob", changed, "--type=merge", '--patch={"spec":{"runPolicy":{"backoffLimit":9}}}')
    kubectl("delete", "ppojob", deleted)
    assert operator.probe("healthz") == 200  # A restart would not bring the API server back.
    proxy.restore()

    jobs.wait_for(made, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)
    jobs.wait(changed, lambda status: status["observedGeneration"] == 2)
    kubectl("wait", "--for=delete", "rayclusters", "--selector", f"ppojob.dev/job={deleted}", "--timeout=240s")
    assert operator.log.read_text().count(LEADS) >= terms + 1


@pytest.mark.parametrize("status", [429, 503, 409])
def test_writes_that_are_refused_for_now_are_done_later(
    jobs: Any, operator: Any, proxy: HidingProxy, status: int
) -> None:
    jobs.wait_until(operator.leads)
    proxy.refusals["PATCH"] = status
    name = jobs.create()
    jobs.wait_until(lambda: f"{jobs.kubectl.namespace}/{name}: " in operator.log.read_text())
    assert jobs.status(name) == {}

    proxy.restore()

    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)
    jobs.wait(name, lambda status: "rayCluster" in status)


def test_a_watch_that_fell_silent_is_noticed_and_the_jobs_are_seen_nevertheless(
    jobs: Any, operator: Any, proxy: HidingProxy
) -> None:
    jobs.wait_until(operator.leads)
    proxy.are_watches_frozen = True
    name = jobs.create()

    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)
    missed_at = time.monotonic()

    def is_noticed() -> bool:
        nonlocal missed_at
        if operator.probe("healthz") == 503:
            return True
        # A replica that loses the Lease meanwhile lists all jobs when it leads again: only a new one is missed then.
        if time.monotonic() > missed_at + MISSED_SECONDS:
            jobs.create()
            missed_at = time.monotonic()
        return False

    jobs.wait_until(is_noticed, limit=300)

    proxy.restore()
    jobs.wait_until(lambda: operator.probe("healthz") == 200)
