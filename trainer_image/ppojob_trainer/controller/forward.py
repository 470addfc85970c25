"""The forward phases of a step: scores, values and log-probs, on a whole batch or on its parts as they are generated.

    chain "c"      ┌─ values part 1 ─ ref part 1 ─┐┌─ values parts 2, 3 ─ ref parts 2, 3 ─┐
    chain (none)   ├─ reward part 1 ┐┌─ 2 ┐┌─ 3 ┐
                 part 1            2      3: the last response is finished

Phases of one chain run one after the other; phases of different chains run at the same time. A phase that has several
pools is in the chain of each: when a chain has nothing else to compute, it computes some rows of that phase
(`shared_rows`). A row's result depends only on the row, so neither the division into parts nor the order changes it.
Called by `ppo`; `forward_plan` defines the phases and chains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from ppojob_trainer.controller.parts import Chain, Part
from ppojob_trainer.controller.ports import B, Metrics
from ppojob_trainer.controller.shared_rows import Helper, SharedRows

__all__ = [
    "ChainPhases",
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

    compute: maps a batch to its new columns; if the phase has several pools, all compute parts of the batch at the same
    time. metrics: of the columns of all rows. ready: returns when the phase may start. helpers: the pools of the phase,
    by the role that computes it there.
    """

    compute: Callable[[B], Coroutine[Any, Any, B]]
    metrics: Callable[[B], Metrics]
    ready: Callable[[], Awaitable[object]]
    helpers: Mapping[str, Helper[B]] = field(default_factory=dict)

    @staticmethod
    def of(
        helpers: Mapping[str, Helper[B]], metrics: Callable[[B], Metrics], ready: Callable[[], Awaitable[object]]
    ) -> ForwardPhase[B]:
        """Return a phase that one pool computes, or several."""

        async def compute(batch: B) -> B:
            if len(helpers) == 1:
                (only,) = helpers.values()
                columns: B = await only.in_turn(only.compute(batch))
                return columns
            rows = SharedRows(helpers, len(batch))
            rows.add(Part(range(len(batch)), batch))

            async def follow(role: str) -> None:
                while rows.has_waiting:
                    await rows.help(role)

            await gather_or_cancel(follow(role) for role in helpers)
            return rows.found()

        return ForwardPhase(compute, metrics, ready, helpers)


@dataclass(frozen=True)
class ChainPhases:
    """The phases of a chain, in their order.

    own: computed on every row, one phase after the other. shared: phases that other chains compute too, with the role
    under which this chain does: computed when nothing of its own waits.
    """

    own: Sequence[str]
    shared: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> list[str]:
        """All phases, in the order in which the chain computes them."""
        return [*self.own, *self.shared]


def no_metrics(_: object) -> Metrics:
    """Return the metrics of a phase that has none."""
    return {}


async def at_once() -> None:
    """Let a phase start at once."""
    return None


async def on_whole(phases: Mapping[str, ForwardPhase[B]], chains: Iterable[ChainPhases], batch: B) -> dict[str, B]:
    """Return the columns of each phase, computed on the whole batch."""
    running = StreamedPhases(phases, len(batch))
    running.end()
    try:
        return await running.found(chains, batch)
    finally:
        running.cancel()


class StreamedPhases(Generic[B]):
    """Computes phases on parts of a batch as they arrive. A busy chain then takes all parts that arrived at once.

    Args:
        num_rows: of the whole batch.
    """

    def __init__(self, phases: Mapping[str, ForwardPhase[B]], num_rows: int) -> None:
        self._phases = phases
        self._chains: list[Chain[B]] = []
        self._shared: dict[str, SharedRows[B]] = {}
        self._num_rows = num_rows
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ended = False
        self._changed = asyncio.Event()

    def follow(self, names: ChainPhases, *, after: asyncio.Event | None = None, whole: B | None = None) -> None:
        """Begin to compute a chain.

        Args:
            after: the chain waits for it.
            whole: the whole batch, if no parts come to this chain.
        """
        chain = Chain[B](names.own)
        chains = [chain] if names.own else []
        shared = {
            name: SharedRows(self._phases[name].helpers, self._num_rows)
            for name in names.shared
            if name not in self._shared
        }
        if whole is not None:
            queues: list[Chain[B] | SharedRows[B]] = [*chains, *shared.values()]
            for queue in queues:
                queue.add(Part(range(len(whole)), whole))
        self._chains += chains
        self._shared |= shared
        self._tasks.append(asyncio.create_task(self._follow(chain, names, after)))

    def add(self, rows: Sequence[int], batch: B) -> None:
        """Add a part; `rows` are its row numbers in the whole batch."""
        for each in self._queues():
            each.add(Part(rows, batch))
        self._notify()

    def drop(self, rows: Sequence[int]) -> None:
        """Forget rows whose responses were lost. They come again, and may differ by the engine's rounding."""
        for each in self._queues():
            each.drop(rows)

    def read_from(self, batch: B) -> None:
        """Take the rows that wait from `batch`, the whole one: the processes that made the parts may be lost."""
        for each in self._queues():
            each.read_from(batch)

    def end(self) -> None:
        """Signal that there are no more parts."""
        self._is_ended = True
        self._notify()

    async def found(self, others: Iterable[ChainPhases] = (), whole: B | None = None) -> dict[str, B]:
        """Wait for all phases on all parts; return each phase's columns of the whole batch, in its row order.

        Args:
            others: chains that begin only now, with the whole batch.
        """
        for names in others:
            self.follow(names, whole=whole)
        try:
            await asyncio.gather(*self._tasks)
        finally:
            self.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        found = {name: columns for chain in self._chains for name, columns in chain.found().items()}
        return {**found, **{name: rows.found() for name, rows in self._shared.items()}}

    def cancel(self) -> None:
        """Cancel the phases that are not computed yet."""
        for task in self._tasks:
            task.cancel()
            # Retrieve its exception: `found` raised it, or nobody awaits it any more.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _follow(self, chain: Chain[B], names: ChainPhases, after: asyncio.Event | None) -> None:
        if after is not None:
            await after.wait()
        # Parts queue up until the first phase may start.
        await self._phases[names.all[0]].ready()
        while True:
            if chain.has_waiting:
                await self._compute(chain)
            elif shared := next((name for name in names.shared if self._shared[name].has_waiting), None):
                await self._phases[shared].ready()
                await self._shared[shared].help(names.shared[shared])
            elif self._is_ended:
                return
            else:
                await self._changed.wait()

    async def _compute(self, chain: Chain[B]) -> None:
        part = await chain.take_all()
        assert part is not None, "parts wait"
        for name in chain.names:
            await self._phases[name].ready()
            chain.keep(name, Part(part.rows, await self._phases[name].compute(part.batch)))

    def _queues(self) -> list[Chain[B] | SharedRows[B]]:
        return [*self._chains, *self._shared.values()]

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Like asyncio.gather, but the first failure cancels the others; it is raised unwrapped."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
