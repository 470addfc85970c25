"""Jobs of a namespace that is not served any more: those that do not run are released, and never start or resume."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import ANNOTATION_RETRY, Condition, Phase, Reason
from ppojob_operator.loop import Loop
from tests.unit.operator.loop.memory_cluster import (
    GOOD,
    OURS,
    SELECTOR,
    SPEC,
    LabelledCluster,
    MemoryCluster,
    make_loop,
    run_for,
)
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time

FETCHED: dict[str, Any] = {**SPEC, "model": {"actor": {"path": "hf://acme/tiny"}}}
QUEUED: dict[str, Any] = {**SPEC, "runPolicy": {"queueName": "gpus"}}


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loop", "work_queue"):
        monkeypatch.setattr(f"ppojob_operator.{module}.monotonic", now)


class Site:
    """A loop with one job, whose namespace has the label at first."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.cluster: MemoryCluster = LabelledCluster(GOOD)
        self.cluster.jobs[GOOD]["spec"] = spec
        self.loop: Loop = make_loop(self.cluster, namespace_selector=SELECTOR)
        self.serve("ns")

    @property
    def job(self) -> dict[str, Any]:
        return self.cluster.jobs[GOOD]

    def serve(self, *names: str) -> None:
        self.loop.namespaces._selected = frozenset(names)

    async def reconcile(self, times: int = 1) -> list[str]:
        outcomes = []
        for _ in range(times):
            self.loop.enqueue(GOOD)
            outcomes.append(await self.loop.reconcile(GOOD))
        return outcomes

    async def end_the_fetch(self, condition: str) -> None:
        """Let the Job that fetches models and data exist, and end."""
        await self.reconcile()
        ended = {"type": condition, "status": "True", "message": "401 from hf"}
        self.cluster.fetch_jobs[GOOD] = {**self.cluster.fetch_jobs[GOOD], "status": {"conditions": [ended]}}
        await self.reconcile()

    def edit(self, spec: dict[str, Any]) -> None:
        self.job["spec"] = spec
        self.job["metadata"]["generation"] += 1

    def suspend(self, *, wanted: bool) -> None:
        self.edit({**self.job["spec"], "runPolicy": {"suspend": wanted}})

    def ask_for_a_retry(self) -> None:
        self.job["metadata"]["annotations"] = {ANNOTATION_RETRY: "now"}

    async def assert_released(self, phase: str) -> None:
        """Assert that the job is released with one Event, and that nothing is created for it."""
        applied = list(self.cluster.applied)
        assert await self.reconcile(3) == ["left"] * 3
        assert "operator" not in self.job["status"]
        assert self.job["status"]["phase"] == phase
        assert self.cluster.events.count(Reason.NAMESPACE_NOT_SERVED) == 1
        assert self.cluster.applied == applied


async def test_a_job_whose_fetch_has_failed_is_not_retried() -> None:
    site = Site(FETCHED)
    await site.end_the_fetch("Failed")
    assert site.cluster.verdict(GOOD, Condition.FAILED)[0] == Reason.FETCH_FAILED

    site.serve()
    assert await site.reconcile() == ["ok"], "it is still cleaned up, and deleted at its ttl"
    site.ask_for_a_retry()

    await site.assert_released(Phase.FAILED)
    assert site.cluster.deleted == []


async def test_a_suspended_job_whose_fetch_is_complete_is_released_and_does_not_resume() -> None:
    site = Site(FETCHED)
    await site.end_the_fetch("Complete")
    site.suspend(wanted=True)
    await site.reconcile()
    site.cluster.clusters.clear()

    site.serve()
    await site.assert_released(Phase.SUSPENDED)
    site.suspend(wanted=False)
    await site.assert_released(Phase.SUSPENDED)

    site.serve("ns")
    assert await site.reconcile() == ["ok"]
    assert site.cluster.applied[-1] == "RayCluster"


async def test_a_suspended_job_that_is_resumed_while_its_ray_cluster_is_deleted_does_not_start() -> None:
    site = Site(FETCHED)
    await site.end_the_fetch("Complete")
    site.suspend(wanted=True)
    await site.reconcile()

    site.serve()
    site.suspend(wanted=False)
    applied = list(site.cluster.applied)
    assert await site.reconcile(2) == ["left"] * 2
    assert (site.cluster.applied, site.job["status"]["operator"]) == (applied, OURS.to_wire())
    site.cluster.clusters.clear()
    await site.assert_released(Phase.SUSPENDED)


async def test_an_ended_job_whose_ray_cluster_is_being_deleted_is_not_retried() -> None:
    site = Site(SPEC)
    await site.reconcile()
    [created] = site.cluster.clusters[GOOD]
    being_deleted = {**created["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    site.cluster.clusters[GOOD] = [{**created, "metadata": being_deleted}]
    del site.job["status"]["rayCluster"]
    failed = {"type": Condition.FAILED, "status": "True", "reason": "X", "message": "", "observedGeneration": 1}
    site.job["status"] |= {"phase": Phase.FAILED, "completionTime": "2026-01-01T00:00:00Z"}
    site.job["status"]["conditions"].append({**failed, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    site.ask_for_a_retry()

    site.serve()
    assert await site.reconcile(2) == ["left"] * 2
    assert (site.job["status"]["phase"], site.job["status"]["operator"]) == (Phase.FAILED, OURS.to_wire())
    site.cluster.clusters.clear()
    await site.assert_released(Phase.FAILED)


async def test_a_queued_job_that_is_not_accepted_any_more_loses_its_ray_cluster_and_is_released() -> None:
    site = Site(QUEUED)
    await site.reconcile()
    [created] = site.cluster.clusters[GOOD]
    site.cluster.clusters[GOOD] = [{**created, "spec": {**created["spec"], "suspend": True}}]
    await site.reconcile()
    assert site.job["status"]["phase"] == Phase.QUEUED
    site.serve()
    assert await site.reconcile() == ["ok"], "it was accepted"
    site.edit({**QUEUED, "data": {}})
    assert await site.reconcile() == ["ok"]
    assert (site.job["status"]["phase"], len(site.cluster.clusters[GOOD])) == (Phase.PENDING, 1)

    name = created["metadata"]["name"]
    assert await site.reconcile() == ["left"]
    assert (site.cluster.deleted, site.cluster.secrets) == ([name], set())
    site.cluster.clusters.clear()
    await site.assert_released(Phase.PENDING)
    assert "rayCluster" not in site.job["status"]

    site.edit(QUEUED)
    site.serve("ns")
    await site.reconcile(2)
    assert site.job["status"]["rayCluster"]["name"] != name, "pods of the deleted one may still end"


async def test_a_job_is_released_when_its_ray_cluster_is_deleted_even_if_no_watch_reports_it() -> None:
    site = Site(FETCHED)
    await site.end_the_fetch("Complete")
    site.suspend(wanted=True)
    await site.reconcile()

    await run_for(site.loop, 2)
    assert Reason.NAMESPACE_NOT_SERVED not in site.cluster.events
    site.cluster.clusters.clear()
    await run_for(site.loop, 10)

    assert site.cluster.events.count(Reason.NAMESPACE_NOT_SERVED) == 1
