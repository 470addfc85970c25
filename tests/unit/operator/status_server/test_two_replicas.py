"""Reports of one job come to either of two replicas; the status only ever moves forward. In virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import ProgressReport
from ppojob_operator.status_server import JobIdentity, OperatorMetrics
from ppojob_operator.status_server.fields import progress_status
from ppojob_operator.status_server.writer import ProgressWriter
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time

INTERVAL = 10.0


class Replica:
    """One replica's writer, and its clock of the day, which may be wrong."""

    def __init__(self, cluster: Any, key: JobIdentity, *, skew: float = 0.0) -> None:
        self.writer = ProgressWriter(cluster, OperatorMetrics(), interval_seconds=INTERVAL, clock=now)
        self._key = key
        self._skew = timedelta(seconds=skew)

    def take(self, report: dict[str, Any], number: int, **changes: Any) -> None:
        """Take a report as the intake does."""
        parsed = ProgressReport.model_validate({**report, "number": number, "step": number, **changes})
        arrived = datetime(2026, 1, 31, tzinfo=UTC) + timedelta(seconds=now()) + self._skew
        self.writer.keep(self._key, lambda job: progress_status(parsed, job, arrived))


@pytest.fixture
def steps(cluster: Any, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the status had, one after the other: what is written is in the object from then on."""
    had: list[int] = []

    async def apply_progress(key: JobIdentity, status_of: Callable[[Any], dict[str, Any] | None]) -> bool:
        status = status_of(job)
        if status is not None:
            job["status"] |= status
            had.append(status["progress"]["step"])
        return True

    monkeypatch.setattr(cluster, "apply_progress", apply_progress)
    return had


@asynccontextmanager
async def running(*replicas: Replica) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(replica.writer.run()) for replica in replicas]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
async def test_a_report_that_one_kept_never_overwrites_a_newer_one_of_the_other(
    cluster: Any, key: JobIdentity, report: dict[str, Any], steps: list[int], skew: float
) -> None:
    one, other = Replica(cluster, key), Replica(cluster, key, skew=skew)
    async with running(one, other):
        one.take(report, 1)
        await asyncio.sleep(1)
        one.take(report, 2)  # Kept for the rest of the interval.
        await asyncio.sleep(1)
        other.take(report, 3)  # The other one has not written yet: at once.
        await asyncio.sleep(2 * INTERVAL)

    assert steps == [1, 3]


async def test_the_end_is_not_overwritten_by_what_was_kept_before_it(
    cluster: Any, key: JobIdentity, report: dict[str, Any], steps: list[int], job: dict[str, Any]
) -> None:
    one, other = Replica(cluster, key), Replica(cluster, key)
    async with running(one, other):
        one.take(report, 1)
        await asyncio.sleep(1)
        one.take(report, 2)
        other.take(report, 3, activity="Finished", modelPath="/data/model")
        await asyncio.sleep(2 * INTERVAL)

    assert steps == [1, 3]
    assert job["status"]["progress"]["activity"] == "Finished"
    assert job["status"]["model"] == {"path": "/data/model"}


async def test_reports_that_alternate_are_all_of_one_course(
    cluster: Any, key: JobIdentity, report: dict[str, Any], steps: list[int]
) -> None:
    replicas = [Replica(cluster, key), Replica(cluster, key)]
    async with running(*replicas):
        for number in range(1, 40):
            replicas[number % 2].take(report, number)
            await asyncio.sleep(2)
        await asyncio.sleep(2 * INTERVAL)

    assert steps == sorted(steps)
    assert steps[-1] == 39
