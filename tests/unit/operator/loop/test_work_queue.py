"""The queue: one entry per job, the earliest requested time counts, and no job is reconciled twice at the same time."""

import asyncio

import pytest

from ppojob_operator.plan import JobKey
from ppojob_operator.work_queue import WorkQueue
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time

A, B = JobKey("ns", "a"), JobKey("ns", "b")


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppojob_operator.work_queue.monotonic", now)


async def test_many_notes_about_a_job_are_one_look() -> None:
    queue = WorkQueue()
    for _ in range(100):
        queue.add(A)

    assert await queue.take(0.01) == A
    queue.done(A)
    assert await queue.take(0.01) is None


async def test_nothing_is_given_out_before_its_time() -> None:
    queue = WorkQueue()
    queue.add(A, 0.1)

    assert await queue.take(0.01) is None
    assert await queue.take(1) == A


async def test_an_earlier_time_replaces_a_later_one_and_not_the_other_way_round() -> None:
    queue = WorkQueue()
    queue.add(A, 60)
    queue.add(A)
    queue.add(A, 60)

    assert await queue.take(0.01) == A
    queue.done(A)
    assert await queue.take(0.01) is None


async def test_the_job_that_is_due_first_comes_first() -> None:
    queue = WorkQueue()
    queue.add(A, 0.02)
    queue.add(B, 0.01)

    assert await queue.take(1) == B
    assert await queue.take(1) == A


async def test_a_job_in_work_is_not_given_out_again_but_remembered() -> None:
    queue = WorkQueue()
    queue.add(A)
    assert await queue.take(0.01) == A

    queue.add(A)
    assert await queue.take(0.01) is None
    queue.done(A)

    assert await queue.take(0.01) == A


async def test_a_job_in_work_does_not_hold_up_another() -> None:
    queue = WorkQueue()
    queue.add(A)
    await queue.take(0.01)
    queue.add(A)
    queue.add(B)

    assert await queue.take(0.01) == B


async def test_a_waiting_worker_is_woken_by_a_note() -> None:
    queue = WorkQueue()
    waiting = asyncio.create_task(queue.take(10))
    await asyncio.sleep(0.01)

    queue.add(A)

    assert await asyncio.wait_for(waiting, 60) == A


async def test_a_waiting_worker_is_woken_when_a_job_comes_out_of_work() -> None:
    queue = WorkQueue()
    queue.add(A)
    await queue.take(0.01)
    queue.add(A)
    waiting = asyncio.create_task(queue.take(10))
    await asyncio.sleep(0.01)

    queue.done(A)

    assert await asyncio.wait_for(waiting, 60) == A


async def test_many_workers_share_the_work_without_overlap() -> None:
    queue, keys, in_work, seen = WorkQueue(), [JobKey("ns", str(i)) for i in range(20)], set[JobKey](), list[JobKey]()
    for key in keys:
        queue.add(key)

    async def work() -> None:
        while (key := await queue.take(0.05)) is not None:
            assert key not in in_work
            in_work.add(key)
            queue.add(key, 60)
            await asyncio.sleep(0.001)
            in_work.remove(key)
            seen.append(key)
            queue.done(key)

    await asyncio.gather(*(work() for _ in range(4)))

    assert sorted(seen) == sorted(keys)


@pytest.mark.parametrize(("delays", "depth"), [((0, 0), 2), ((0, 60), 1), ((60, 60), 0)])
async def test_the_depth_counts_what_is_due(delays: tuple[float, float], depth: int) -> None:
    queue = WorkQueue()
    queue.add(A, delays[0])
    queue.add(B, delays[1])

    assert len(queue) == depth
