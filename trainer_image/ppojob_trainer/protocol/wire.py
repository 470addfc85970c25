"""How a column is stored: as NumPy arrays, which pickle protocol 5 hands to Ray's object store without a copy.

A pickled torch tensor is copied several times on its way through the store: 64 MiB on two busy cores took 0.13-0.7 s
in and 0.05-0.2 s out, 0.015-0.07 s in and 0.01 s out in this form. A reader gets views of the store's memory, which is
read-only, and `gather` copies the rows that it needs into new memory, once. Called by `worker_groups.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.ragged import Ragged

__all__ = ["Column", "PackedColumn", "Piece", "gather", "num_bytes", "pack"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
ObjectArray: TypeAlias = np.ndarray[Any, np.dtype[np.object_]]
Positions: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Column: TypeAlias = Ragged | Tensor | ObjectArray


@dataclass(frozen=True)
class PackedColumn:
    """A column on its way.

    values: [T] of a ragged column, else [B, ...]; of dtype object for values that are not tensors. lengths: of a ragged
    column. dtype: that of the tensor, where NumPy lacks it and `values` has its bits; None for values without a tensor.
    """

    values: Array
    lengths: Positions | None
    dtype: torch.dtype | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What all parts of a column have in common."""
        return self.dtype, self.lengths is None, self.values.shape[1:]


@dataclass(frozen=True)
class Piece:
    """Rows of one part: they become the rows `to` of the result, in the same order."""

    part: PackedColumn
    rows: Positions
    to: Positions


def num_bytes(column: Column) -> int:
    """Return the size; of arrays of objects only the references are counted."""
    return column.values.nbytes + column.lengths.nbytes if isinstance(column, Ragged) else int(column.nbytes)


def pack(column: Column) -> PackedColumn:
    """Return the column as NumPy arrays, which share its memory if it is on the CPU."""
    if isinstance(column, np.ndarray):
        return PackedColumn(column, None, None)
    values = column.values if isinstance(column, Ragged) else column
    plain = values.detach().cpu().contiguous()
    bits = plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain
    return PackedColumn(bits.numpy(), column.lengths.numpy() if isinstance(column, Ragged) else None, plain.dtype)


def gather(name: str, pieces: Sequence[Piece], num_rows: int) -> Column:
    """Return the column of `num_rows` rows that the pieces make up; it owns its memory and may be written to.

    Raises:
        ProtocolError: the parts differ in dtype or shape; says which column.
    """
    first = pieces[0].part
    if len({piece.part.kind for piece in pieces}) > 1:
        kinds = sorted({f"{piece.part.dtype}{list(piece.part.values.shape[1:])}" for piece in pieces})
        raise ProtocolError(f"the ranks returned column {name!r} as {' and as '.join(kinds)}: return the same from all")
    if first.lengths is not None:
        return _gather_ragged(pieces, num_rows)
    values = np.empty((num_rows, *first.values.shape[1:]), dtype=first.values.dtype)
    for piece in pieces:
        values[piece.to] = piece.part.values[piece.rows]
    return values if first.dtype is None else torch.from_numpy(values).view(first.dtype)


def _gather_ragged(pieces: Sequence[Piece], num_rows: int) -> Ragged:
    lengths = np.zeros(num_rows, dtype=np.int64)
    for piece in pieces:
        assert piece.part.lengths is not None, "all parts are ragged"
        lengths[piece.to] = piece.part.lengths[piece.rows]
    ends = np.cumsum(lengths).tolist()
    values = np.empty(int(lengths.sum()), dtype=pieces[0].part.values.dtype)
    for piece in pieces:
        assert piece.part.lengths is not None, "all parts are ragged"
        stops = np.cumsum(piece.part.lengths)[piece.rows].tolist()
        for stop, to, length in zip(stops, piece.to.tolist(), lengths[piece.to].tolist(), strict=True):
            values[ends[to] - length : ends[to]] = piece.part.values[stop - length : stop]
    dtype = pieces[0].part.dtype
    assert dtype is not None, "a ragged column is a tensor"
    return Ragged(torch.from_numpy(values).view(dtype), torch.from_numpy(lengths))
