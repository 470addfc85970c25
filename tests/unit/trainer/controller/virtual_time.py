"""A clock for tests without processes: it moves only when every task waits for it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
_TURNS = 50


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
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            self._advance()
        return await task

    async def kill_at(self, end: float, work: Awaitable[T]) -> None:
        """Move the time until `end`, then cancel `work`."""
        task = asyncio.ensure_future(work)
        while not task.done() and (not self._waiting or self._waiting[0][0] <= end):
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if self._waiting and self._waiting[0][0] <= end:
                self._advance()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _advance(self) -> None:
        if self._waiting:
            self.now, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
