"""`Ragged`: a column whose rows have different numbers of tokens, without padding.

    values   [T]  the tokens of all rows, one row after the other
    lengths  [B]  tokens of each row; they sum up to T

Example:

    >>> column = Ragged.from_rows([[5, 6, 7], [8]], torch.int32)
    >>> column.padded()
    tensor([[5, 6, 7],
            [8, 0, 0]], dtype=torch.int32)

Part of `DataProto`. Its operations return new columns, which may share memory. It refuses values and lengths that do
not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppojob_trainer.protocol.errors import ProtocolError

__all__ = ["Ragged"]


@dataclass(frozen=True, eq=False)
class Ragged:
    """values: [T] of any dtype. lengths: int64 [B], on the CPU."""

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.lengths.dim() != 1:
            shapes = f"{list(self.values.shape)} and {list(self.lengths.shape)}"
            raise ProtocolError(f"a ragged column has values [T] and lengths [B], got {shapes}")
        if int(self.lengths.sum()) != len(self.values):
            raise ProtocolError(
                f"{len(self.values)} values do not fit lengths that sum up to {int(self.lengths.sum())}"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Ragged:
        """Return the column of B lists of numbers."""
        values = [torch.empty(0, dtype=dtype), *(torch.tensor(list(row), dtype=dtype) for row in rows)]
        return cls(torch.cat(values), torch.tensor([len(row) for row in rows], dtype=torch.int64))

    @classmethod
    def concat(cls, columns: Sequence[Ragged]) -> Ragged:
        """Return the rows of all columns, in order."""
        return cls(torch.cat([one.values for one in columns]), torch.cat([one.lengths for one in columns]))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    @property
    def starts(self) -> Tensor:
        """Position of each row's first value, int64 [B]."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def row_of(self) -> Tensor:
        """Row of each value, int64 [T]."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @property
    def place_of(self) -> Tensor:
        """Position of each value in its row, int64 [T]."""
        return torch.arange(len(self.values)) - torch.repeat_interleave(self.starts, self.lengths)

    def rows(self) -> list[Tensor]:
        """Return the rows as B views of the values."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def to_lists(self) -> list[list[Any]]:
        """Return the rows as lists of numbers."""
        return [row.tolist() for row in self.rows()]

    def take(self, rows: slice | Tensor) -> Ragged:
        """Return these rows (a slice of step 1, or int64 numbers), in this order. A slice shares the memory."""
        if isinstance(rows, slice):
            first, stop, step = rows.indices(len(self))
            if step != 1:
                return self.take(torch.arange(first, stop, step))
            before, inside = int(self.lengths[:first].sum()), self.lengths[first : max(first, stop)]
            return Ragged(self.values[before : before + int(inside.sum())], inside)
        lengths = self.lengths[rows]
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return Ragged(self.values[torch.repeat_interleave(self.starts[rows], lengths) + within], lengths)

    def tail(self, lengths: Tensor) -> Ragged:
        """Return the last `lengths[b]` values of each row b."""
        is_tail = self.place_of >= torch.repeat_interleave(self.lengths - lengths, self.lengths)
        return Ragged(self.values[is_tail], lengths)

    def head(self, lengths: Tensor) -> Ragged:
        """Return the first `lengths[b]` values of each row b."""
        return Ragged(self.values[self.place_of < torch.repeat_interleave(lengths, self.lengths)], lengths)

    def with_values(self, values: Tensor) -> Ragged:
        """Return other values [T] with the same lengths."""
        return Ragged(values, self.lengths)

    def padded(self, width: int | None = None) -> Tensor:
        """Return [B, R], filled with zeros behind each row; R is `width`, or the length of the longest row.

        Raises:
            ProtocolError: a row is longer than `width`.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        if width is not None and longest > width:
            raise ProtocolError(f"row {int(self.lengths.argmax())} has {longest} tokens, more than the width {width}")
        padded = self.values.new_zeros(len(self), longest if width is None else width)
        padded[self.row_of, self.place_of] = self.values
        return padded

    def unpadded(self, padded: Tensor) -> Ragged:
        """Return a column with this column's lengths and the entries of `padded` [B, R], which may have any dtype.

        Raises:
            ProtocolError: `padded` has another number of rows, or is too narrow.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        if padded.dim() != 2 or padded.shape[0] != len(self) or padded.shape[1] < longest:
            raise ProtocolError(
                f"a padded tensor [{len(self)}, R] with R >= {longest} is needed, got {list(padded.shape)}"
            )
        return self.with_values(padded[self.row_of, self.place_of])

    def sums(self) -> Tensor:
        """Return the sum of each row, float64 [B]."""
        return torch.zeros(len(self), dtype=torch.float64).index_add(0, self.row_of, self.values.cpu().double())

    def any(self) -> Tensor:
        """Return whether a row has a value that is not 0, bool [B]."""
        return self.with_values(self.values != 0).sums() > 0
