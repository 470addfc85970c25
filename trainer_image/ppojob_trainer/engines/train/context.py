"""Context parallelism: which tokens of a micro-batch a context rank has, and which keys its queries attend to.

The padded tokens are divided into twice as many chunks as there are ranks. A rank has one from the beginning and one
from the end, because attention is causal: queries at the end attend to more keys than those at the beginning.

    2 ranks    chunks 0 1 2 3    rank 0 has 0 and 3    rank 1 has 1 and 2

Each rank gathers the keys and values of all ranks and attends with its own queries. The queries of a chunk attend to
one range of the packed tokens: from the beginning of the first sequence in the chunk to the end of the chunk. Called by
`batch` for each micro-batch, on the host; `sequence` gathers. It refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Attended", "Chunks", "attended"]


@dataclass(frozen=True)
class Chunks:
    """The chunks of all context ranks; size: tokens of one of them."""

    num_ranks: int
    size: int

    def of(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return first and last place of the two chunks of a rank; the last one is outside."""
        early, late = rank, 2 * self.num_ranks - 1 - rank
        return (early * self.size, (early + 1) * self.size), (late * self.size, (late + 1) * self.size)

    def in_gathered(self, places: Tensor) -> Tensor:
        """Return where the tokens of these places are after a gather, in the order of the ranks: int64, same shape."""
        chunk, offset = places // self.size, places % self.size
        is_late = chunk >= self.num_ranks
        rank = torch.where(is_late, 2 * self.num_ranks - 1 - chunk, chunk)
        return (2 * rank + is_late) * self.size + offset


@dataclass(frozen=True)
class Attended:
    """The pieces of sequences in a rank's chunks, in the order of its tokens, and the keys of each.

    The queries of a piece are the last ones of its keys' tokens. places: int64, the keys of all pieces in the order of
    the pieces, after a gather.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    places: Tensor


def attended(lengths: Sequence[int], chunks: Chunks, rank: int) -> Attended:
    """Return what the queries of a rank attend to.

    Args:
        lengths: of the packed sequences. What fills up the chunks is a separate sequence.
    """
    ends = torch.tensor(lengths).cumsum(0).tolist()
    total = 2 * chunks.num_ranks * chunks.size
    bounds = list(zip([0, *ends], [*ends, total], strict=True))
    queries, keys, ranges = [], [], []
    for first, last in chunks.of(rank):
        inside = [(max(begin, first), min(end, last), begin) for begin, end in bounds if begin < last and end > first]
        queries += [end - begin for begin, end, _ in inside]
        keys += [end - of_sequence for _, end, of_sequence in inside]
        ranges.append(torch.arange(inside[0][2], last))
    return Attended(tuple(queries), tuple(keys), chunks.in_gathered(torch.cat(ranges)))
