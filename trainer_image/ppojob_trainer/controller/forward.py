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
from dataclasses import dataclass, replace
from typing import Any, Generic

from ppojob_trainer.controller.parts import Chain, Part
from ppojob_trainer.controller.ports import B, Metrics

__all__ = [
    "ForwardPhase",
    "StreamedPhases",
    "at_once",
    "gather_or_cancel",
    "no_metrics",
    "on_whole",
]


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

    def after(self, event: asyncio.Event) -> ForwardPhase[B]:
        """Return the same phase, which also waits for an event before it starts."""

        async def ready() -> None:
            await event.wait()
            await self.ready()

        return replace(self, ready=ready)


def no_metrics(_: object) -> Metrics:
    """Return the metrics of a phase that has none."""
    return {}


async def at_once() -> None:
    """Let a phase start at once."""
    return None


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
        self._chains = [Chain[B](names) for names in chains]
        self._tasks = [asyncio.create_task(self._follow(chain)) for chain in self._chains]

    def add(self, rows: Sequence[int], batch: B) -> None:
        """Add a part; `rows` are its row numbers in the whole batch."""
        for chain in self._chains:
            chain.add(Part(rows, batch))

    def drop(self, rows: Sequence[int]) -> None:
        """Forget rows whose responses were lost. They come again, and may differ by the engine's rounding."""
        for chain in self._chains:
            chain.drop(rows)

    def read_from(self, batch: B) -> None:
        """Take the rows that wait from `batch`, the whole one: the processes that made the parts may be lost."""
        for chain in self._chains:
            chain.read_from(batch)

    def end(self) -> None:
        """Signal that there are no more parts."""
        for chain in self._chains:
            chain.end()

    async def found(self) -> dict[str, B]:
        """Wait for all phases on all parts; return each phase's columns of the whole batch, in its row order."""
        await asyncio.gather(*self._tasks)
        return {name: columns for chain in self._chains for name, columns in chain.found().items()}

    def cancel(self) -> None:
        """Cancel the phases that are not computed yet."""
        for task in self._tasks:
            task.cancel()
            # Retrieve its exception: `found` raised it, or nobody awaits it any more.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _follow(self, chain: Chain[B]) -> None:
        # Parts queue up until the first phase may start.
        await self._phases[chain.names[0]].ready()
        while part := await chain.take_all():
            for name in chain.names:
                await self._phases[name].ready()
                chain.keep(name, Part(part.rows, await self._phases[name].compute(part.batch)))


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Like asyncio.gather, but the first failure cancels the others; it is raised unwrapped."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
