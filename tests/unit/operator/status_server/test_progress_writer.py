"""At most one write in an interval, always the newest report, and none is lost. In virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

import pytest

from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.status_server import JobIdentity, OperatorMetrics
from ppojob_operator.status_server.writer import ProgressWriter
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time

INTERVAL = 10.0
AT_ONCE = 1.0


def said(status: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Return what makes this status of any object."""
    return lambda _: status


@pytest.fixture
def metrics() -> OperatorMetrics:
    return OperatorMetrics()


@pytest.fixture
def writer(cluster: Any, metrics: OperatorMetrics) -> ProgressWriter:
    return ProgressWriter(cluster, metrics, interval_seconds=INTERVAL, clock=now)


@asynccontextmanager
async def running(writer: ProgressWriter) -> AsyncIterator[None]:
    task = asyncio.create_task(writer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], seconds: float = 10 * INTERVAL) -> float:
    """Wait for the condition and return how long it took."""
    begin = now()
    while not condition():
        assert now() < begin + seconds, "the condition did not come true"
        await asyncio.sleep(0.01)
    return now() - begin


async def test_the_first_report_is_written_at_once(writer: ProgressWriter, cluster: Any, key: JobIdentity) -> None:
    async with running(writer):
        writer.keep(key, said({"n": 1}))

        assert await until(lambda: cluster.writes == [(key, {"n": 1})]) < AT_ONCE


async def test_a_younger_report_is_kept_and_written_after_the_interval_the_newest_only(
    writer: ProgressWriter, cluster: Any, key: JobIdentity
) -> None:
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: len(cluster.writes) == 1)
        begin = now()
        for number in range(2, 8):
            writer.keep(key, said({"n": number}))
            await asyncio.sleep(INTERVAL / 10)
        await until(lambda: len(cluster.writes) == 2)

        assert now() - begin == pytest.approx(INTERVAL, abs=0.1)
        assert cluster.writes[1] == (key, {"n": 7})
        await asyncio.sleep(1.5 * INTERVAL)
        assert len(cluster.writes) == 2


async def test_a_stream_of_reports_makes_one_write_in_each_interval(
    writer: ProgressWriter, cluster: Any, key: JobIdentity
) -> None:
    async with running(writer):
        begin = now()
        while (spent := now() - begin) < 4.5 * INTERVAL:
            writer.keep(key, said({"at": spent}))
            await asyncio.sleep(0.01)

    assert len(cluster.writes) == 5


async def test_jobs_do_not_wait_for_each_other(writer: ProgressWriter, cluster: Any, key: JobIdentity) -> None:
    async with running(writer):
        for number in range(50):
            writer.keep(key._replace(name=f"job-{number}"), said({"n": number}))

        assert await until(lambda: len(cluster.writes) == 50) < AT_ONCE


async def test_the_last_report_is_written_at_once(writer: ProgressWriter, cluster: Any, key: JobIdentity) -> None:
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: len(cluster.writes) == 1)
        writer.keep(key, said({"n": 2}), is_last=True)

        assert await writer.written(key, AT_ONCE)
        assert cluster.writes[1] == (key, {"n": 2})


async def test_the_last_report_overtakes_a_write_that_is_on_its_way(
    writer: ProgressWriter, cluster: Any, key: JobIdentity
) -> None:
    gate = asyncio.Event()
    cluster.before_write = gate.wait
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await asyncio.sleep(0.1)
        writer.keep(key, said({"n": 2}), is_last=True)
        gate.set()

        assert await writer.written(key, AT_ONCE)
        assert [status["n"] for _, status in cluster.writes] == [1, 2]


async def test_a_report_that_comes_while_another_is_being_written_is_not_lost(
    writer: ProgressWriter, cluster: Any, key: JobIdentity
) -> None:
    gate = asyncio.Event()
    cluster.before_write = gate.wait
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await asyncio.sleep(0.1)
        writer.keep(key, said({"n": 2}))
        gate.set()

        assert await until(lambda: len(cluster.writes) == 2) > INTERVAL / 2
        assert [status["n"] for _, status in cluster.writes] == [1, 2]


async def test_a_write_that_failed_is_tried_again(
    writer: ProgressWriter, cluster: Any, key: JobIdentity, unavailable: ApiUnavailable
) -> None:
    cluster.errors["apply_progress"] = iter([unavailable, unavailable])
    async with running(writer):
        writer.keep(key, said({"n": 1}))

        assert await until(lambda: len(cluster.writes) == 1) > 1.5 * INTERVAL


async def test_what_the_api_server_refuses_for_good_is_dropped_after_some_tries(
    writer: ProgressWriter, cluster: Any, key: JobIdentity, metrics: OperatorMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.errors["apply_progress"] = repeat(ApiRefused("422 progress.step: Invalid value"), 5)
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: "is dropped" in caplog.text)
        failed = metrics.registry.get_sample_value("ppojob_progress_status_writes_total", {"outcome": "failed"})
        assert failed == 5
        assert "422 progress.step" in caplog.text

        writer.keep(key, said({"n": 2}))
        await until(lambda: cluster.writes == [(key, {"n": 2})])


async def test_a_job_that_is_gone_is_forgotten(writer: ProgressWriter, cluster: Any, key: JobIdentity) -> None:
    cluster.jobs.clear()
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: len(cluster.writes) == 1)
        await until(lambda: not writer._jobs)

    assert len(cluster.writes) == 1


async def test_nothing_is_lost_at_the_end(writer: ProgressWriter, cluster: Any, key: JobIdentity) -> None:
    gate = asyncio.Event()
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: len(cluster.writes) == 1)
        cluster.before_write = gate.wait
        writer.keep(key, said({"n": 2}))  # Due in an interval.
        writer.keep(key._replace(name="other"), said({"n": 3}))  # On its way when the end comes.
        await asyncio.sleep(0.1)
    gate.set()

    assert await writer.flush(1) == 0
    assert sorted(status["n"] for _, status in cluster.writes) == [1, 2, 3]


async def test_the_end_tries_again_where_a_write_fails(
    writer: ProgressWriter, cluster: Any, key: JobIdentity, unavailable: ApiUnavailable
) -> None:
    cluster.errors["apply_progress"] = iter([unavailable])
    writer.keep(key, said({"n": 1}))

    assert await writer.flush(5) == 0
    assert cluster.writes == [(key, {"n": 1})]


async def test_the_end_waits_for_an_unavailable_api_server_no_longer_than_it_may(
    writer: ProgressWriter, cluster: Any, key: JobIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.before_write = asyncio.Event().wait
    writer.keep(key, said({"n": 1}))
    begin = now()

    assert await writer.flush(0.2) == 1
    assert now() - begin == pytest.approx(0.2, abs=0.01)
    assert "rl-team/arithmetic" in caplog.text


async def test_the_dispatcher_shows_that_it_lives(cluster: Any, metrics: OperatorMetrics, key: JobIdentity) -> None:
    beats = []
    writer = ProgressWriter(cluster, metrics, interval_seconds=INTERVAL, clock=now, beat=lambda: beats.append(1))
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: len(beats) >= 2)


async def test_a_write_is_computed_from_the_current_object(
    writer: ProgressWriter, cluster: Any, key: JobIdentity, job: dict[str, Any]
) -> None:
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: len(cluster.writes) == 1)
        writer.keep(key, lambda found: {"saw": found["status"]["attempt"]})
        job["status"]["attempt"] = 7  # While the report waits for the end of the interval.
        await until(lambda: len(cluster.writes) == 2)

    assert cluster.writes[1] == (key, {"saw": 7})


async def test_a_report_that_another_replica_overtook_is_done_with(
    writer: ProgressWriter, cluster: Any, key: JobIdentity
) -> None:
    async with running(writer):
        writer.keep(key, lambda _: None)

        assert await writer.written(key, AT_ONCE)
    assert cluster.writes == []


async def test_the_lag_of_writes_is_measured(
    writer: ProgressWriter, cluster: Any, key: JobIdentity, metrics: OperatorMetrics
) -> None:
    async with running(writer):
        writer.keep(key, said({"n": 1}))
        await until(lambda: len(cluster.writes) == 1)

    assert metrics.registry.get_sample_value("ppojob_progress_status_write_lag_seconds_count") == 1


@pytest.mark.parametrize(("num_jobs", "interval"), [(1, 10.0), (300, 10.0), (600, 20.0), (2000, 30.0)])
async def test_the_more_jobs_report_the_longer_is_the_interval(
    writer: ProgressWriter, num_jobs: int, interval: float
) -> None:
    for number in range(num_jobs):
        writer.keep(JobIdentity("team", f"job-{number}", f"uid-{number}"), said({"n": number}))

    assert writer.interval == interval


async def test_with_many_jobs_the_writes_per_second_are_bounded(writer: ProgressWriter, cluster: Any) -> None:
    keys = [JobIdentity("team", f"job-{number}", f"uid-{number}") for number in range(600)]

    async with running(writer):
        for second in range(60):
            for key in keys:
                writer.keep(key, said({"second": second}))
            await asyncio.sleep(1)

    # Every 20 s each job, and the first report at once.
    assert len(cluster.writes) == 600 * 3


async def test_with_few_jobs_again_the_interval_is_short_again(writer: ProgressWriter, cluster: Any) -> None:
    async with running(writer):
        for number in range(600):
            writer.keep(JobIdentity("team", f"job-{number}", f"uid-{number}"), said({}))
        await until(lambda: len(cluster.writes) == 600)
        await until(lambda: writer.interval == INTERVAL, seconds=40)
