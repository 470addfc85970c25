"""The queue of jobs that need a look: each at most once, the earliest wish counts. The loop and its workers use it.

A heap of wishes, of which some are out of date: a later wish is kept out, an earlier one leaves the old one behind.
"""

import asyncio
import heapq
from time import monotonic

from ppojob_operator.plan import JobKey


class WorkQueue:
    """Jobs that need a look, each at most once, with the time from which on; a job in work is not given out again."""

    def __init__(self) -> None:
        self._due: dict[JobKey, float] = {}
        self._heap: list[tuple[float, JobKey]] = []
        self._in_work: set[JobKey] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return how many jobs wait for a look that is due."""
        now = monotonic()
        return sum(due <= now for due in self._due.values())

    def add(self, key: JobKey, delay: float = 0.0) -> None:
        """Ask for a look after `delay` seconds; an earlier one that was asked for stays."""
        due = monotonic() + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._push(key)

    async def take(self, limit: float) -> JobKey | None:
        """Return the next job that is due, or None after `limit` seconds. It is in work until `done`."""
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
        """Say that the look is over."""
        self._in_work.discard(key)
        if key in self._due:
            self._push(key)

    def _push(self, key: JobKey) -> None:
        if key not in self._in_work:
            heapq.heappush(self._heap, (self._due[key], key))
            self._changed.set()

    def _drop_stale_entries(self) -> None:
        """Let the heap begin with a wish that stands, of a job that is not in work; `done` brings those back."""
        while self._heap and (self._heap[0][1] in self._in_work or self._due.get(self._heap[0][1]) != self._heap[0][0]):
            heapq.heappop(self._heap)


async def wait(event: asyncio.Event, limit: float) -> bool:
    """Wait for an event for at most `limit` seconds; return whether it came."""
    try:
        async with asyncio.timeout(limit):
            await event.wait()
    except TimeoutError:
        return False
    return True
