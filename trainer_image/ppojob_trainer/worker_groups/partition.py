"""Which rows of a batch go to which rank: pure arithmetic on row numbers and lengths.

Called by `dispatch` (equal contiguous parts) and by the roles (balanced parts, minibatches, whole groups). It never
reads a row's content. If the rows cannot be divided evenly, a share is padded with copies. The receiver sets their
response mask to zero, so they have no weight in sums and losses, and their results are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppojob_trainer.maths.balancing import balance_over_ranks

__all__ = ["Partition", "Share", "balanced", "contiguous", "in_groups", "in_minibatches", "spread"]


@dataclass(frozen=True)
class Share:
    """The rows of one rank, in the order in which it gets them; `padding` holds the positions of copies."""

    rows: tuple[int, ...]
    padding: frozenset[int] = frozenset()

    def __add__(self, other: Share) -> Share:
        moved = frozenset(position + len(self.rows) for position in other.padding)
        return Share(self.rows + other.rows, self.padding | moved)


Partition = tuple[Share, ...]
"""One share for each data-parallel rank; apart from copies, every row of the batch is in exactly one of them."""


def contiguous(num_rows: int, num_ranks: int) -> Partition:
    """Divide into equal consecutive parts, padded at the end with copies of the first rows.

    Raises:
        ValueError: no rows or no ranks.
    """
    _check(num_rows, num_ranks)
    padded = num_rows + -num_rows % num_ranks
    size = padded // num_ranks
    return tuple(_share(range(rank * size, (rank + 1) * size), num_rows) for rank in range(num_ranks))


def spread(num_rows: int, num_ranks: int) -> Partition:
    """Divide into consecutive parts that differ by at most one row; without copies, so a part may be empty.

    For ranks without collectives: copies would be generated or scored in vain.

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
    """Balance each minibatch separately, so that every rank holds its part of minibatch 0, then of minibatch 1, ...

    Minibatch k starts at row k * minibatch_rows for any number of ranks, so the optimizer steps do not depend on that
    number.

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
    """Divide into parts of whole groups (the samples of one prompt are consecutive); copies are whole groups too.

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
