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

    def only(self, positions: Sequence[int]) -> _Part[B]:
        return _Part([self.rows[position] for position in positions], self.batch.take(positions))


class _Waiting(Generic[B]):
    """The parts that wait for a chain. Each row is handed out once."""

    def __init__(self) -> None:
        self._parts: list[_Part[B]] = []
        self._known: set[int] = set()
        self._is_ended = False
        self._changed = asyncio.Event()

    def add(self, part: _Part[B]) -> None:
        """Add the rows that are not known yet: the chain may have computed those of a lost engine already."""
        new = [position for position, row in enumerate(part.rows) if row not in self._known]
        self._known.update(part.rows)
        if new:
            self._parts.append(part if len(new) == len(part.rows) else part.only(new))
            self._changed.set()

    def drop(self, rows: Sequence[int]) -> None:
        """Forget those rows that still wait; they come again."""
        lost = set(rows)
        kept = [(part, [position for position, row in enumerate(part.rows) if row not in lost]) for part in self._parts]
        self._known -= {row for part in self._parts for row in part.rows} & lost
        self._parts = [part.only(positions) for part, positions in kept if positions]

    def end(self) -> None:
        self._is_ended = True
        self._changed.set()

    async def take_all(self) -> list[_Part[B]]:
        """Wait for a part; return it and all others that wait. The list is empty after the last part."""
        while not self._parts and not self._is_ended:
            self._changed.clear()
            await self._changed.wait()
        parts, self._parts = self._parts, []
        return parts


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
        self._waiting = [_Waiting[B]() for _ in chains]
        followed = zip(chains, self._waiting, strict=True)
        self._tasks = [asyncio.create_task(self._follow(names, waiting)) for names, waiting in followed]

    def add(self, rows: Sequence[int], batch: B) -> None:
        """Add a part; `rows` are its row numbers in the whole batch."""
        for waiting in self._waiting:
            waiting.add(_Part(rows, batch))

    def drop(self, rows: Sequence[int]) -> None:
        """Forget those of the rows that no phase has begun to read: they were lost and will be added again."""
        for waiting in self._waiting:
            waiting.drop(rows)

    def end(self) -> None:
        """Signal that there are no more parts."""
        for waiting in self._waiting:
            waiting.end()

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

    async def _follow(self, names: Sequence[str], waiting: _Waiting[B]) -> dict[str, B]:
        # Parts queue up until the first phase may start.
        await self._phases[names[0]].ready()
        found: dict[str, list[_Part[B]]] = {name: [] for name in names}
        while parts := await waiting.take_all():
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


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Like asyncio.gather, but the first failure cancels the others; it is raised unwrapped."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
