"""Rows of a batch by number: parts that wait to be computed, and columns that were. Called by `forward` and the filler.

The controller passes row numbers and references, never tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Generic

from ppojob_trainer.controller.ports import B

__all__ = ["Chain", "Part", "join_parts", "without_rows"]


@dataclass(frozen=True)
class Part(Generic[B]):
    """Rows by number, and what is known of them."""

    rows: Sequence[int]
    batch: B

    @staticmethod
    def joined(parts: Sequence[Part[B]]) -> Part[B]:
        """Return the rows of all parts, in their order, as one part."""
        first, *others = (part.batch for part in parts)
        rows = [row for part in parts for row in part.rows]
        return Part(rows, first.join_rows(others, range(len(rows))) if others else first)

    def divided(self, number: int) -> tuple[Part[B], Part[B]]:
        """Return the first `number` rows and the others."""
        before, after = range(number), range(number, len(self.rows))
        return (
            Part(self.rows[:number], self.batch.take(before)),
            Part(self.rows[number:], self.batch.take(after)),
        )

    def without(self, rows: Set[int]) -> Part[B] | None:
        """Return the part without these rows; None if none is left."""
        kept = [position for position, row in enumerate(self.rows) if row not in rows]
        if len(kept) == len(self.rows):
            return self
        return Part([self.rows[position] for position in kept], self.batch.take(kept)) if kept else None


class Chain(Generic[B]):
    """The parts of one chain: those that wait, those that are being computed, and what was computed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._waiting: list[Part[B]] = []
        self._found: dict[str, list[Part[B]]] = {name: [] for name in names}
        self._dropped: set[int] = set()
        self._is_ended = False
        self._changed = asyncio.Event()

    @property
    def has_waiting(self) -> bool:
        """Whether parts wait."""
        return bool(self._waiting)

    def add(self, part: Part[B]) -> None:
        """Add a part."""
        self._waiting.append(part)
        self._changed.set()

    def drop(self, rows: Sequence[int]) -> None:
        """Forget rows, also those that are computed or being computed."""
        lost = frozenset(rows)
        self._dropped |= lost
        self._waiting = without_rows(self._waiting, lost)
        self._found = {name: without_rows(parts, lost) for name, parts in self._found.items()}

    def read_from(self, batch: B) -> None:
        """Take the rows that wait from `batch`, which has all of them."""
        self._waiting = [Part(part.rows, batch.take(part.rows)) for part in self._waiting]

    def end(self) -> None:
        """Signal that there are no more parts."""
        self._is_ended = True
        self._changed.set()

    async def take_all(self) -> Part[B] | None:
        """Wait for a part; return it with all others that wait. None after the last part."""
        while not self._waiting and not self._is_ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._waiting:
            return None
        parts, self._waiting, self._dropped = self._waiting, [], set()
        return Part.joined(parts)

    def keep(self, name: str, computed: Part[B]) -> list[int]:
        """Keep the columns that a phase computed, without the rows that were dropped meanwhile; return the rows."""
        kept = without_rows([computed], self._dropped)
        self._found[name] += kept
        return [row for part in kept for row in part.rows]

    def found(self) -> dict[str, B]:
        """Return each phase's columns of the whole batch, in its row order."""
        return {name: join_parts((part.rows, part.batch) for part in parts) for name, parts in self._found.items()}


def without_rows(parts: Iterable[Part[B]], rows: Set[int]) -> list[Part[B]]:
    """Return the parts without these rows; those of which none is left are left out."""
    return [left for part in parts if (left := part.without(rows)) is not None]


def join_parts(parts: Iterable[tuple[Sequence[int], B]]) -> B:
    """Return the rows of all parts as one batch, each row at its number."""
    found = list(parts)
    first, *others = (batch for _, batch in found)
    numbers = [row for rows, _ in found for row in rows]
    is_whole = not others and numbers == list(range(len(numbers)))
    return first if is_whole else first.join_rows(others, numbers)
