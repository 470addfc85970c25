"""Sharing sequences out so that every rank, and every micro-batch, has about the same work.

Karmarkar-Karp differencing (N. Karmarkar, R. Karp, "The differencing method of set partitioning", 1982, UCB/CSD
82/113), for k parts, also with equal numbers of items. Deterministic: the same input gives the same answer on every
rank, so ranks need not talk. Called by the dispatch of batches over ranks, and by `packing` for micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count


def karmarkar_karp(weights: Sequence[float], num_parts: int, equal_size: bool = False) -> list[list[int]]:
    """Divide items into `num_parts` parts of nearly equal weight.

    Args:
        weights: one number >= 0 for each item.
        equal_size: every part gets the same number of items; `num_parts` must divide the number of items.

    Returns:
        `num_parts` lists of item indices, each ascending, in the order of their first item. Without `equal_size` a
        part is empty only if there are fewer items than parts.

    Raises:
        ValueError: no parts, or a number of items that cannot be divided equally.
    """
    if num_parts < 1:
        raise ValueError(f"the number of parts must be at least 1, got {num_parts}")
    if equal_size and len(weights) % num_parts:
        raise ValueError(f"{len(weights)} items cannot be divided into {num_parts} parts of equal size")
    order = sorted(range(len(weights)), key=lambda item: (weights[item], item))
    if equal_size:
        starts = [
            _Partition.of_each(weights, order[first : first + num_parts], num_parts)
            for first in range(0, len(order), num_parts)
        ]
    else:
        starts = [_Partition.of_each(weights, [item], num_parts) for item in order]
    parts = _difference(starts, num_parts)
    return sorted((sorted(part) for part in parts), key=lambda part: (not part, part))


def sequence_work(lengths: Sequence[int], hidden_size: int = 0) -> list[float]:
    """Work of a forward and backward pass over each sequence, in arbitrary units.

    A decoder layer costs about 24 D^2 + 4 D L floating point operations for each token of a sequence of length L
    (hidden size D, multiply and add counted apart): L * (6 D + L) in units of 4 D. hidden_size 0 counts tokens.
    """
    if hidden_size == 0:
        return [float(length) for length in lengths]
    return [float(length) * (6 * hidden_size + length) for length in lengths]


def balance_over_ranks(lengths: Sequence[int], num_ranks: int, hidden_size: int = 0) -> list[list[int]]:
    """Give every rank the same number of sequences and nearly the same work: `num_ranks` lists of row indices.

    Flattened, it is the order in which `DataProto.reorder` must put the rows before `chunk(num_ranks)`.

    Raises:
        ValueError: `num_ranks` does not divide the number of sequences.
    """
    return karmarkar_karp(sequence_work(lengths, hidden_size), num_ranks, equal_size=True)


@dataclass
class _Partition:
    """k parts and their weights, heaviest first."""

    sums: list[float]
    parts: list[list[int]]

    @classmethod
    def of_each(cls, weights: Sequence[float], items: Sequence[int], num_parts: int) -> _Partition:
        """One part for each of the items, heaviest first, and empty ones up to `num_parts`."""
        heaviest_first = sorted(items, key=lambda item: (-weights[item], item))
        sums = [float(weights[item]) for item in heaviest_first]
        missing = num_parts - len(heaviest_first)
        return cls(sums + [0.0] * missing, [[item] for item in heaviest_first] + [[] for _ in range(missing)])

    @property
    def spread(self) -> float:
        return self.sums[0] - self.sums[-1]

    def merge(self, other: _Partition) -> _Partition:
        """Join the heaviest part of one with the lightest of the other, and so on: their differences cancel."""
        joined = [
            (mine + theirs, my_items + their_items)
            for mine, theirs, my_items, their_items in zip(
                self.sums, reversed(other.sums), self.parts, reversed(other.parts), strict=True
            )
        ]
        joined.sort(key=lambda pair: -pair[0])
        return _Partition([weight for weight, _ in joined], [items for _, items in joined])


def _difference(starts: list[_Partition], num_parts: int) -> list[list[int]]:
    if not starts:
        return [[] for _ in range(num_parts)]
    tie_break = count()
    heap = [(-start.spread, next(tie_break), start) for start in starts]
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        merged = first.merge(heapq.heappop(heap)[2])
        heapq.heappush(heap, (-merged.spread, next(tie_break), merged))
    return heap[0][2].parts
