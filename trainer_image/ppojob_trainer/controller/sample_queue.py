"""The samples of one generation, from which the engines of all pools take their work. Pure; called by `generation`.

    64 prompts x 4 samples, 2 engines that compute 64 sequences at a time

    engine 0   takes 72 ── 8 finished ── takes 8 more ── ... ── nothing left: finishes what it has
    engine 1   takes 72 ──────── 8 finished ── takes 8 more ── ...
    engine 1 is lost: what it had not finished waits again, and engine 0 takes it

At the start each engine gets its share, as far as it can compute that at the same time. The rest waits for whichever
engine is done first. The longest expected responses come first, because a long response that starts late keeps one
engine busy while the others are idle. Samples that are added while the engines generate come after all others, because
dynamic sampling needs the earlier ones first. Samples of a prompt stay together where that keeps the shares equal,
because an engine computes a prompt once and reuses its cache. A sample's seed is its own, so no number depends on any
of this.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, TypeVar

from ppojob_trainer.controller.ports import Capacity, Sample

__all__ = ["LengthHistory", "SampleQueue"]

E = TypeVar("E", bound=Hashable)

_RESERVE = 1 / 8
"""An engine has this share more samples than it computes at a time, so that it need not wait for the controller."""
_MAX_PARTS, _MAX_PARTS_OF_ALL = 16, 64
"""Into how many parts an engine's responses are divided while they are streamed: each part costs the controller some
milliseconds, so with many engines each sends fewer."""
_PARTS_OF_OPEN = 8
"""While samples may still be added, an engine reports as soon as it has finished this part of what it has."""


class LengthHistory:
    """How long the responses to each prompt were when it was last generated, in tokens. Not saved: it changes only the
    order of the work."""

    def __init__(self) -> None:
        self._mean_of: dict[Hashable, float] = {}
        self._sum = 0.0

    def observe(self, samples: Sequence[Sample], lengths: Sequence[int]) -> None:
        """Take over the lengths of a generation's responses."""
        found: dict[Hashable, list[int]] = {}
        for sample, length in zip(samples, lengths, strict=True):
            found.setdefault(sample.prompt, []).append(length)
        for prompt, of_prompt in found.items():
            mean = sum(of_prompt) / len(of_prompt)
            self._sum += mean - self._mean_of.get(prompt, 0.0)
            self._mean_of[prompt] = mean

    def expected(self, sample: Sample) -> float:
        """Return how long the response is expected to be: as before; for a new prompt the mean of all, at first 0."""
        known = self._mean_of
        return known[sample.prompt] if sample.prompt in known else self._sum / max(1, len(known))


@dataclass
class _Group:
    """The waiting samples of a prompt. tokens: expected for each, prompt and response."""

    rows: list[int]
    tokens: float


@dataclass
class _Engine:
    """What an engine has. dealt: groups that it takes first. held: unfinished samples, with their expected tokens."""

    capacity: Capacity
    dealt: list[_Group] = field(default_factory=list)
    held: dict[int, float] = field(default_factory=dict)

    def take(self, group: _Group, share: int) -> list[int]:
        """Take as many samples of a group as there is room for."""
        count = min(len(group.rows), room(self.capacity, share, len(self.held), sum(self.held.values()), group.tokens))
        rows, group.rows = group.rows[:count], group.rows[count:]
        self.held |= dict.fromkeys(rows, group.tokens)
        return rows


def room(capacity: Capacity, share: int, num_held: int, tokens_held: float, tokens: float) -> int:
    """Return how many more samples of so many tokens an engine may have, which has others already.

    Args:
        share: the most that it should have while other engines could have them.
    """
    most = math.ceil((1 + _RESERVE) * capacity.num_sequences)
    count = min(share, most) - num_held
    if capacity.cache_tokens and tokens:
        left = (1 + _RESERVE) * capacity.cache_tokens - tokens_held
        # At least one: a sample that needs the whole cache is computed alone.
        count = min(count, max(int(left // tokens), 1 if not num_held else 0))
    return max(0, count)


class SampleQueue(Generic[E]):
    """The samples of a generation: which of them wait, and which engine has the others."""

    def __init__(self, samples: Sequence[Sample], history: LengthHistory, capacities: Mapping[E, Capacity]) -> None:
        """
        Args:
            samples: of each row; those of a prompt are consecutive.
            capacities: of each engine that takes part, at once or later.
        """
        self._history = history
        self._tokens: list[float] = []
        self._engines = {engine: _Engine(capacity) for engine, capacity in capacities.items()}
        self._share = math.ceil(len(samples) / max(1, len(capacities)))
        self._waiting = self._deal(self._groups_of(samples))

    @property
    def num_waiting(self) -> int:
        """Number of samples that no engine has."""
        dealt = [group for engine in self._engines.values() for group in engine.dealt]
        return sum(len(group.rows) for group in [*self._waiting, *dealt])

    @property
    def num_unfinished(self) -> int:
        """Number of samples that wait or that an engine has."""
        return self.num_waiting + sum(len(each.held) for each in self._engines.values())

    def num_held(self, engine: E) -> int:
        """Number of unfinished samples that an engine has."""
        return len(self._engines[engine].held)

    def take(self, engine: E) -> list[int]:
        """Return the rows that an engine is to begin now; none if it has enough, or if no more wait."""
        mine, found = self._engines[engine], list[int]()
        while groups := self._next_groups(mine):
            rows = mine.take(groups[0], self._share)
            found += rows
            if groups[0].rows:
                # The engine is full. The other samples of this prompt are its next work, for the cache's sake.
                if rows and groups is not mine.dealt:
                    mine.dealt.insert(0, groups.pop(0))
                break
            groups.pop(0)
        return found

    def _next_groups(self, mine: _Engine) -> list[_Group]:
        """Return the groups that an engine takes next: its own, those of nobody, those of the others; empty: none."""
        others = (other.dealt for other in self._engines.values() if other is not mine)
        return next((groups for groups in (mine.dealt, self._waiting, *others) if groups), [])

    def add(self, samples: Sequence[Sample]) -> None:
        """Add samples, with the next row numbers; those of a prompt are consecutive."""
        self._waiting += self._groups_of(samples)
        self._share = math.ceil(self.num_unfinished / max(1, len(self._engines)))

    def _groups_of(self, samples: Sequence[Sample]) -> list[_Group]:
        """Number the samples; return their groups, those with the longest expected responses first."""
        first = len(self._tokens)
        self._tokens += [sample.num_tokens + self._history.expected(sample) for sample in samples]
        groups = [[first + row for row in rows] for rows in _by_prompt(samples)]
        return _longest_first([_Group(rows, self._tokens[rows[0]]) for rows in groups])

    def finish(self, engine: E, rows: Sequence[int]) -> None:
        """Record that an engine has finished these rows."""
        for row in rows:
            del self._engines[engine].held[row]

    def join(self, engine: E, capacity: Capacity) -> None:
        """Add an engine that takes part from now on; one that is known stays."""
        self._engines.setdefault(engine, _Engine(capacity))

    def lose(self, engine: E, finished: Sequence[int] = ()) -> list[int]:
        """Let everything that an engine had wait for the others; return the samples that must be repeated.

        Args:
            finished: rows that it had finished and whose responses are lost.
        """
        lost = self._engines.pop(engine)
        repeated = sorted([*lost.held, *finished])
        groups = [_Group([row], self._tokens[row]) for row in repeated]
        self._waiting = _longest_first([*self._waiting, *lost.dealt, *groups])
        self._share = max(self._share, math.ceil(self.num_unfinished / max(1, len(self._engines))))
        return repeated

    def rows_of_part(self, engine: E, *, is_streamed: bool, is_open: bool = False) -> int:
        """Return how many responses an engine should finish before it reports them.

        is_open: what is reported decides which samples are added.
        """
        held = self.num_held(engine)
        parts = min(_MAX_PARTS, max(2, _MAX_PARTS_OF_ALL // max(1, len(self._engines))))
        size = math.ceil(self._share / parts) if is_streamed else held
        if self.num_waiting:
            # Before it has used up its reserve.
            size = min(size, math.ceil(_RESERVE * held))
        if is_open:
            # The fewer are left, the fewer wait for the slowest of them.
            size = min(size, math.ceil(held / _PARTS_OF_OPEN))
        return min(held, size)

    def _deal(self, groups: list[_Group]) -> list[_Group]:
        """Deal each engine its share, the longest first to the engine with the fewest tokens; return the rest."""
        dealt = {engine: (0, 0.0) for engine in self._engines}
        left: list[_Group] = []
        for group in groups:
            while group.rows:
                free = {
                    engine: room(mine.capacity, self._share, *dealt[engine], group.tokens)
                    for engine, mine in self._engines.items()
                }
                whole = [engine for engine, count in free.items() if count >= len(group.rows)]
                some = whole or [engine for engine, count in free.items() if count]
                if not some:
                    left.append(group)
                    break
                least = min(some, key=lambda engine: dealt[engine][1])
                rows, group.rows = group.rows[: free[least]], group.rows[free[least] :]
                self._engines[least].dealt.append(_Group(rows, group.tokens))
                number, tokens = dealt[least]
                dealt[least] = number + len(rows), tokens + len(rows) * group.tokens
        return left


def _longest_first(groups: Sequence[_Group]) -> list[_Group]:
    return sorted(groups, key=lambda group: -group.tokens)


def _by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    return [list(rows) for _, rows in groupby(range(len(samples)), key=lambda row: samples[row].prompt)]
