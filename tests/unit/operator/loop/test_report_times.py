"""A report is as old as the leader has seen it unchanged, whatever time another replica's clock gave it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ppojob_operator import loop as loop_module
from ppojob_operator.plan import Job, Observed, Plan
from ppojob_operator.reading import read_job
from ppojob_operator.report_times import ReportTimes
from tests.unit.operator.loop.memory_cluster import GOOD, OURS, SPEC, MemoryCluster, make_loop

pytestmark = pytest.mark.virtual_time

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def job(uid: str = "u", **progress: Any) -> Job:
    """Return a job with a report in its status."""
    metadata = {"namespace": GOOD.namespace, "name": GOOD.name, "uid": uid, "generation": 1}
    return read_job({"metadata": metadata, "spec": SPEC, "status": {"progress": progress} if progress else {}})


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_a_report_keeps_the_time_of_its_first_reconcile_until_another_one_comes() -> None:
    times = ReportTimes()
    first: dict[str, Any] = {"attempt": 0, "report": 1, "lastUpdateTime": "2026-03-01T11:00:00Z"}

    assert times.seen(job(), at(0)) is None
    assert times.seen(job(**first), at(10)) == at(10)
    assert times.seen(job(**first), at(20)) == at(10)
    assert times.seen(job(**{**first, "report": 2}), at(30)) == at(30)
    assert times.seen(job(**{**first, "attempt": 1}), at(40)) == at(40)
    # An older trainer numbers none.
    unnumbered: dict[str, Any] = {"attempt": 1, "report": 0}
    assert times.seen(job(**unnumbered, lastUpdateTime="2026-03-01T11:00:00Z"), at(50)) == at(50)
    assert times.seen(job(**unnumbered, lastUpdateTime="2026-03-01T11:00:10Z"), at(60)) == at(60)


def test_another_object_of_the_same_name_and_a_job_that_was_forgotten_begin_again() -> None:
    times = ReportTimes()
    report: dict[str, Any] = {"attempt": 0, "report": 1}
    times.seen(job(**report), at(0))

    assert times.seen(job("another", **report), at(10)) == at(10)
    times.forget(GOOD)
    assert times.seen(job("another", **report), at(20)) == at(20)


async def test_the_loop_passes_to_the_policies_when_it_saw_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[datetime | None] = []

    def decide(_: Job, observed: Observed, __: datetime) -> Plan:
        told.append(observed.reported_at)
        return Plan()

    monkeypatch.setattr(loop_module, "decide", decide)
    cluster = MemoryCluster(GOOD)
    loop, moments = make_loop(cluster), iter((0, 10, 20))
    cluster.jobs[GOOD]["status"] = {"operator": OURS.to_wire(), "progress": {"attempt": 0, "report": 7}}

    for report in (7, 7, 8):
        now = at(next(moments))
        monkeypatch.setattr(loop, "_clock", lambda now=now: now)
        cluster.jobs[GOOD]["status"]["progress"]["report"] = report
        await loop.reconcile(GOOD)

    assert told == [at(0), at(0), at(20)]
