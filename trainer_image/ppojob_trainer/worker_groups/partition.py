"""Which rows of a batch go to which rank: pure arithmetic on row numbers and lengths.

Called by `dispatch` (equal contiguous parts) and by the roles (balanced parts, minibatches, whole groups). It never
sees a row's content. Where the rows do not divide, a share is filled up with copies whose response mask the receiver
zeroes: they weigh nothing in sums and losses, and their results are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppojob_trainer.maths.balancing import balance_over_ranks

__all__ = ["Partition", "Share", "balanced", "contiguous", "in_groups", "in_minibatches", "spread"]


@dataclass(frozen=True)
class Share:
    """The rows of one rank, in the order in which it gets them; `padding` holds positions of copies in it."""

    rows: tuple[int, ...]
    padding: frozenset[int] = frozenset()

    def __add__(self, other: Share) -> Share:
        moved = frozenset(position + len(self.rows) for position in other.padding)
        return Share(self.rows + other.rows, self.padding | moved)


Partition = tuple[Share, ...]
"""One share for each data-parallel rank; every row of the batch is in exactly one of them, copies aside."""


def contiguous(num_rows: int, num_ranks: int) -> Partition:
    """Cut into equal parts in order; the last rows are copies of the first ones where `num_rows` does not divide.

    Raises:
        ValueError: no rows or no ranks.
    """
    _check(num_rows, num_ranks)
    padded = num_rows + -num_rows % num_ranks
    size = padded // num_ranks
    return tuple(_share(range(rank * size, (rank + 1) * size), num_rows) for rank in range(num_ranks))


def spread(num_rows: int, num_ranks: int) -> Partition:
    """Cut into parts in order that differ by one row at most; without copies, so a part may be empty.

    For ranks that do not wait for each other: copies would be generated or scored for nothing.

    Raises:
        ValueError: no rows or no ranks.
    """
    _check(num_rows, num_ranks)
    ends = [num_rows * (rank + 1) // num_ranks for rank in range(num_ranks)]
    return tuple(Share(tuple(range(start, end))) for start, end in zip([0, *ends], ends, strict=False))


def balanced(lengths: Sequence[int], num_ranks: int) -> Partition:
    """Give every rank equally many rows and nearly equally many tokens (Karmarkar-Karp).

    Args:
        lengths: tokens of each row.

    Raises:
        ValueError: no rows or no ranks.
    """
    _check(len(lengths), num_ranks)
    num_rows = len(lengths)
    padded = [*lengths, *(lengths[extra % num_rows] for extra in range(-num_rows % num_ranks))]
    return tuple(_share(part, num_rows) for part in balance_over_ranks(padded, num_ranks))


def in_minibatches(lengths: Sequence[int], minibatch_rows: int, num_ranks: int) -> Partition:
    """Balance each minibatch by itself, so that every rank holds its part of minibatch 0, then of minibatch 1, ...

    Minibatch k is rows k * minibatch_rows and following whatever the number of ranks is, so the optimizer steps do
    not depend on it.

    Raises:
        ValueError: `minibatch_rows` does not divide the rows.
    """
    if minibatch_rows < 1 or len(lengths) % minibatch_rows:
        raise ValueError(f"minibatches of {minibatch_rows} rows do not divide the batch of {len(lengths)}")
    shares = [Share(())] * num_ranks
    for start in range(0, len(lengths), minibatch_rows):
        part = balanced(lengths[start : start + minibatch_rows], num_ranks)
        shares = [share + _shifted(more, start) for share, more in zip(shares, part, strict=True)]
    return tuple(shares)


def in_groups(num_rows: int, group_rows: int, num_ranks: int) -> Partition:
    """Cut into parts of whole groups (the samples of one prompt lie side by side); copies are whole groups too.

    Raises:
        ValueError: `group_rows` does not divide the rows.
    """
    if group_rows < 1 or num_rows % group_rows:
        raise ValueError(f"groups of {group_rows} rows do not divide the batch of {num_rows}")
    return tuple(_widened(share, group_rows) for share in contiguous(num_rows // group_rows, num_ranks))


def _widened(share: Share, width: int) -> Share:
    rows = tuple(group * width + member for group in share.rows for member in range(width))
    return Share(rows, frozenset(at * width + member for at in share.padding for member in range(width)))


def _share(positions: Sequence[int], num_rows: int) -> Share:
    rows = tuple(position % num_rows for position in positions)
    return Share(rows, frozenset(at for at, position in enumerate(positions) if position >= num_rows))


def _shifted(share: Share, start: int) -> Share:
    return Share(tuple(row + start for row in share.rows), share.padding)


def _check(num_rows: int, num_ranks: int) -> None:
    if num_rows < 1 or num_ranks < 1:
        raise ValueError(f"{num_rows} rows for {num_ranks} ranks: at least one of each is needed")
