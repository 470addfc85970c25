"""The forward phases of a step: scores, values and log-probs, on a whole batch or on its parts as they are generated.

    chain "c"      ┌─ values part 1 ─ ref part 1 ─┐┌─ values parts 2, 3 ─ ref parts 2, 3 ─┐
    chain (none)   ├─ reward part 1 ┐┌─ 2 ┐┌─ 3 ┐
                 part 1            2      3: the last response is finished

Phases of one chain run one after the other; phases of different chains run at the same time. A row's result depends
only on the row, so neither the division into parts nor the order changes it. Called by `ppo`, which defines the phases
and chains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from ppojob_trainer.controller.ports import B, Metrics

__all__ = ["ForwardPhase", "StreamedPhases", "gather_or_cancel", "join_parts", "on_whole"]


@dataclass(frozen=True)
class ForwardPhase(Generic[B]):
    """How a phase is computed.

    role: the role that computes it. compute: maps a batch to its new columns. metrics: of the columns of all rows.
    ready: returns when the phase may start.
    """

    role: str
    compute: Callable[[B], Coroutine[Any, Any, B]]
    metrics: Callable[[B], Metrics]
    ready: Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class _Part(Generic[B]):
    rows: Sequence[int]
    batch: B


async def on_whole(phases: Mapping[str, ForwardPhase[B]], chains: Iterable[Sequence[str]], batch: B) -> dict[str, B]:
    """Return the columns of each phase, computed on the whole batch."""
    found: dict[str, B] = {}

    async def follow(names: Sequence[str]) -> None:
        for name in names:
            await phases[name].ready()
            found[name] = await phases[name].compute(batch)

    await gather_or_cancel(follow(names) for names in chains)
    return found


class StreamedPhases(Generic[B]):
    """Computes phases on parts of a batch as they arrive. A busy chain then takes all parts that arrived at once."""

    def __init__(self, phases: Mapping[str, ForwardPhase[B]], chains: Sequence[Sequence[str]]) -> None:
        self._phases = phases
        self._waiting: list[asyncio.Queue[_Part[B] | None]] = [asyncio.Queue() for _ in chains]
        followed = zip(chains, self._waiting, strict=True)
        self._tasks = [asyncio.create_task(self._follow(names, waiting)) for names, waiting in followed]

    def add(self, rows: Sequence[int], batch: B) -> None:
        """Add a part; `rows` are its row numbers in the whole batch."""
        for waiting in self._waiting:
            waiting.put_nowait(_Part(rows, batch))

    def end(self) -> None:
        """Signal that there are no more parts."""
        for waiting in self._waiting:
            waiting.put_nowait(None)

    async def found(self) -> dict[str, B]:
        """Wait for all phases on all parts; return each phase's columns of the whole batch, in its row order."""
        found = await asyncio.gather(*self._tasks)
        return {name: columns for one in found for name, columns in one.items()}

    def cancel(self) -> None:
        """Cancel the phases that are not computed yet."""
        for task in self._tasks:
            task.cancel()
            # Retrieve its exception: `found` raised it, or nobody awaits it any more.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _follow(self, names: Sequence[str], waiting: asyncio.Queue[_Part[B] | None]) -> dict[str, B]:
        # Parts queue up until the first phase may start.
        await self._phases[names[0]].ready()
        found: dict[str, list[_Part[B]]] = {name: [] for name in names}
        while parts := await _all_that_wait(waiting):
            rows = [row for part in parts for row in part.rows]
            first, *others = (part.batch for part in parts)
            batch = first.join_rows(others, range(len(rows))) if others else first
            for name in names:
                await self._phases[name].ready()
                found[name].append(_Part(rows, await self._phases[name].compute(batch)))
        return {name: join_parts((part.rows, part.batch) for part in computed) for name, computed in found.items()}


def join_parts(parts: Iterable[tuple[Sequence[int], B]]) -> B:
    """Return the rows of all parts as one batch, each row at its number."""
    found = list(parts)
    first, *others = (batch for _, batch in found)
    return first.join_rows(others, [row for rows, _ in found for row in rows])


async def _all_that_wait(waiting: asyncio.Queue[_Part[B] | None]) -> list[_Part[B]]:
    """Wait for a part; return it and all others that are queued. The list is empty after the last part."""
    parts: list[_Part[B]] = []
    part = await waiting.get()
    while part is not None:
        parts.append(part)
        if waiting.empty():
            return parts
        part = waiting.get_nowait()
    if parts:
        # Leave the end marker for the next call.
        waiting.put_nowait(None)
    return parts


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Like asyncio.gather, but the first failure cancels the others; it is raised unwrapped."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
