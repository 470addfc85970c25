"""A clock for tests without processes: it moves only when every task waits for it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def _until_all_wait() -> None:
    """Let the other tasks run until nothing in the loop is ready."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    while ready:
        await asyncio.sleep(0)


class VirtualTime:
    """A clock that moves only when every task waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self.now + seconds, next(self._numbers), future))
        await future

    async def run(self, work: Awaitable[T]) -> T:
        """Move the time until `work` is done."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await _until_all_wait()
            self._advance()
        return await task

    async def kill_at(self, end: float, work: Awaitable[T]) -> None:
        """Move the time until `end`, then cancel `work`."""
        task = asyncio.ensure_future(work)
        while not task.done() and self._next(end) <= end:
            await _until_all_wait()
            if self._next(end) <= end:
                self._advance()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _next(self, default: float) -> float:
        """Return when the next sleep ends, without those that were cancelled."""
        while self._waiting and self._waiting[0][2].done():
            heapq.heappop(self._waiting)
        return self._waiting[0][0] if self._waiting else default

    def _advance(self) -> None:
        self.now = self._next(self.now)
        if self._waiting:
            heapq.heappop(self._waiting)[2].set_result(None)
