"""The rows of a phase that several pools compute: each pool takes the next ones when it is free.

    rows      ████████████████████████████████
    pool a    ··old_log_prob··├──── 1/4 ────┼1/8┤          a pool that is free earlier computes more
    pool c    ··values··├──────── 1/2 ────────┼1/8┤

A pool takes its share of the rows that wait (guided self-scheduling: Polychronopoulos and Kuck, 1987), so the last
parts are small and all pools end at about the same time. A share is in proportion to the GPUs, and at least an eighth
of the batch, because each part costs calls. Called by `forward`; `step_time` simulates it. A row's result depends only
on the row, so the division changes no number but for rounding.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic

from ppojob_trainer.controller.parts import Part, join_parts, without_rows
from ppojob_trainer.controller.ports import B

__all__ = ["Helper", "SharedRows", "least_rows", "share"]

_MOST_PARTS: Final = 8


@dataclass(frozen=True)
class Helper(Generic[B]):
    """One of the pools that compute a phase.

    in_turn: awaits work as this phase, when the pool's turn comes. compute: maps rows to their new columns. gpus: of
    the pool.
    """

    in_turn: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
    compute: Callable[[B], Coroutine[Any, Any, B]]
    gpus: int


def least_rows(num_rows: int) -> int:
    """Return how many rows of a batch a pool takes at least."""
    return math.ceil(num_rows / _MOST_PARTS)


def share(waiting: int, gpus: int, of_all: int, least: int) -> int:
    """Return how many of the rows that wait a pool takes; `of_all`: the GPUs of all pools that compute the phase."""
    return min(waiting, max(least, math.ceil(waiting * gpus / of_all)))


class SharedRows(Generic[B]):
    """The queue of one phase, by the roles under which its pools compute it.

    Args:
        num_rows: of the whole batch.
    """

    def __init__(self, helpers: Mapping[str, Helper[B]], num_rows: int) -> None:
        self._helpers, self._least = helpers, least_rows(num_rows)
        self._gpus = sum(helper.gpus for helper in helpers.values())
        self._waiting: list[Part[B]] = []
        self._found: list[Part[B]] = []
        # Of the roles that compute rows: which of these were dropped meanwhile.
        self._dropped: dict[str, set[int]] = {}
        self._emptied = asyncio.Event()

    @property
    def has_waiting(self) -> bool:
        """Whether rows wait."""
        return bool(self._waiting)

    def add(self, part: Part[B]) -> None:
        """Add rows."""
        self._waiting.append(part)
        self._emptied.clear()

    def drop(self, rows: Sequence[int]) -> None:
        """Forget rows, also those that are computed or being computed."""
        lost = frozenset(rows)
        for dropped in self._dropped.values():
            dropped |= lost
        self._found = without_rows(self._found, lost)
        self._wait_for(without_rows(self._waiting, lost))

    def read_from(self, batch: B) -> None:
        """Take the rows that wait from `batch`, which has all of them."""
        self._waiting = [Part(part.rows, batch.take(part.rows)) for part in self._waiting]

    async def help(self, role: str) -> None:
        """Compute a share of what waits when the role's pool is free; return earlier if others take all of it."""
        mine = asyncio.create_task(self._helpers[role].in_turn(self._compute(role)))
        emptied = asyncio.create_task(self._emptied.wait())
        try:
            await asyncio.wait({mine, emptied}, return_when=asyncio.FIRST_COMPLETED)
            if mine.done() or role in self._dropped:
                await mine
        finally:
            for task in (mine, emptied):
                task.cancel()
            await asyncio.gather(mine, emptied, return_exceptions=True)

    def found(self) -> B:
        """Return the columns of the whole batch, in its row order."""
        return join_parts((part.rows, part.batch) for part in self._found)

    async def _compute(self, role: str) -> None:
        part = self._take(self._helpers[role].gpus)
        if part is None:
            return
        dropped = self._dropped[role] = set()
        try:
            columns = await self._helpers[role].compute(part.batch)
            self._found += without_rows([Part(part.rows, columns)], dropped)
        finally:
            del self._dropped[role]

    def _take(self, gpus: int) -> Part[B] | None:
        left = share(sum(len(part.rows) for part in self._waiting), gpus, self._gpus, self._least)
        taken: list[Part[B]] = []
        waiting = list(self._waiting)
        while left:
            part = waiting.pop(0)
            if len(part.rows) > left:
                part, rest = part.divided(left)
                waiting.insert(0, rest)
            taken.append(part)
            left -= len(part.rows)
        self._wait_for(waiting)
        return Part.joined(taken) if taken else None

    def _wait_for(self, waiting: list[Part[B]]) -> None:
        self._waiting = waiting
        if not waiting:
            self._emptied.set()
