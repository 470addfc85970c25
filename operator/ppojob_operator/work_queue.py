"""The work queue of the loop: a job is in it at most once, at the earliest requested time.

It is a heap with stale entries: a request for a later time is ignored, one for an earlier time leaves a stale entry.
"""

import asyncio
import heapq
from time import monotonic

from ppojob_operator.plan import JobKey


class WorkQueue:
    """Jobs with the time at which each is due. A job that a worker has taken is not given to a second one."""

    def __init__(self) -> None:
        self._due: dict[JobKey, float] = {}
        self._heap: list[tuple[float, JobKey]] = []
        self._in_work: set[JobKey] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of jobs that are due."""
        now = monotonic()
        return sum(due <= now for due in self._due.values())

    def add(self, key: JobKey, delay: float = 0.0) -> None:
        """Add a job that is due after `delay` seconds; an earlier time for the same job stays."""
        due = monotonic() + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._push(key)

    async def take(self, limit: float) -> JobKey | None:
        """Return the next job that is due, or None after `limit` seconds. The worker has it until `done`."""
        end = monotonic() + limit
        while True:
            self._drop_stale_entries()
            now = monotonic()
            due, key = self._heap[0] if self._heap else (float("inf"), None)
            if key is not None and due <= now:
                heapq.heappop(self._heap)
                del self._due[key]
                self._in_work.add(key)
                return key
            if now >= end:
                return None
            self._changed.clear()
            await wait(self._changed, min(due, end) - now)

    def done(self, key: JobKey) -> None:
        """End the work on a job, so that it may be taken again."""
        self._in_work.discard(key)
        if key in self._due:
            self._push(key)

    def _push(self, key: JobKey) -> None:
        if key not in self._in_work:
            heapq.heappush(self._heap, (self._due[key], key))
            self._changed.set()

    def _drop_stale_entries(self) -> None:
        """Drop stale entries, and those of jobs in work, from the top of the heap; `done` adds the latter again."""
        while self._heap and (self._heap[0][1] in self._in_work or self._due.get(self._heap[0][1]) != self._heap[0][0]):
            heapq.heappop(self._heap)


async def wait(event: asyncio.Event, limit: float) -> bool:
    """Wait for an event for at most `limit` seconds; return whether it is set."""
    try:
        async with asyncio.timeout(limit):
            await event.wait()
    except TimeoutError:
        return False
    return True
