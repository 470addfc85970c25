"""`DataProto`: a batch of sequences, as a worker's method gets and returns it.

It has three parts, and every row of the first two belongs to one sequence:

    columns           tensors: `Ragged` for columns with a value for each token, Tensor [B, ...] for others
    non_tensor_batch  object arrays of length B: text, dictionaries
    meta_info         small values that hold for the whole batch

Example (columns: see `protocol.fields`):

    >>> values = Ragged.from_rows([[0.5, 1.0], [2.0]], torch.float32)
    >>> proto = DataProto.from_dict({"values": values}, {"uid": ["a", "b"]})
    >>> len(proto), proto.padded("values").tolist()
    (2, [[0.5, 1.0], [2.0, 0.0]])

All operations leave the object as it is and return a new one, which may share memory with it. It refuses to guess:
sizes that do not fit and unknown columns are errors with the column's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.keys import Keys
from ppojob_trainer.protocol.layout import object_array
from ppojob_trainer.protocol.ragged import Ragged
from ppojob_trainer.protocol.wire import Column, ObjectArray

Index: TypeAlias = int | slice | Sequence[int] | np.ndarray[Any, Any] | Tensor

__all__ = ["DataProto"]


@dataclass(frozen=True, eq=False)
class DataProto:
    """See the module's docstring. Build it with `from_dict`.

    not_sent: columns that the batch has and the method does not declare, so they were not fetched.
    """

    columns: Mapping[str, Ragged | Tensor] = field(default_factory=dict)
    non_tensor_batch: Mapping[str, ObjectArray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    not_sent: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.dtype != object or array.ndim != 1:
                raise ProtocolError(
                    f"non-tensor column {key!r} must be a 1-d object array: wrap it with object_array()"
                )
        first = next(iter(self._all()), None)
        for key, column in self._all().items():
            if isinstance(column, Tensor) and column.dim() == 0:
                raise ProtocolError(f"column {key!r} is a single number: it needs one for each row")
            if len(column) != len(self):
                raise ProtocolError(f"column {key!r} has {len(column)} rows, but {first!r} has {len(self)}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Ragged | Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | ObjectArray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build one from columns of B rows.

        Raises:
            ProtocolError: a column's number of rows differs from the others'; names the column.
        """
        arrays = {key: object_array(value) for key, value in (non_tensors or {}).items()}
        return cls(dict(tensors or {}), arrays, dict(meta_info or {}))

    @classmethod
    def of_columns(
        cls, columns: Mapping[str, Column], meta_info: Mapping[str, Any], not_sent: Iterable[str] = ()
    ) -> DataProto:
        """Build one from columns of both kinds."""
        tensors = {key: column for key, column in columns.items() if not isinstance(column, np.ndarray)}
        arrays = {key: column for key, column in columns.items() if isinstance(column, np.ndarray)}
        return cls(tensors, arrays, dict(meta_info), frozenset(not_sent))

    def _all(self) -> dict[str, Column]:
        return {**self.columns, **self.non_tensor_batch}

    def __len__(self) -> int:
        return next((len(column) for column in self._all().values()), 0)

    def __contains__(self, key: str) -> bool:
        return key in self.columns or key in self.non_tensor_batch

    def items(self) -> list[tuple[str, Column]]:
        """Return the names and columns of both kinds."""
        return list(self._all().items())

    def __getitem__(self, index: Index) -> DataProto:
        """Rows by slice, index list or boolean mask; a single int gives a batch of one row."""
        if isinstance(index, (int, np.integer)):
            row = int(index) + len(self) if index < 0 else int(index)
            if not 0 <= row < len(self):
                raise IndexError(f"row {index} of a batch of {len(self)}")
            index = slice(row, row + 1)
        if isinstance(index, slice):
            return self._rows(index, index)
        rows = torch.as_tensor(index)
        if rows.dtype == torch.bool:
            if rows.shape != (len(self),):
                raise ProtocolError(f"boolean mask of shape {list(rows.shape)} for a batch of {len(self)}")
            rows = rows.nonzero().flatten()
        rows = rows.cpu().long()
        return self._rows(rows, rows.numpy())

    def _rows(self, rows: slice | Tensor, array_rows: slice | np.ndarray[Any, Any]) -> DataProto:
        columns = {
            key: column.take(rows) if isinstance(column, Ragged) else column[rows]
            for key, column in self.columns.items()
        }
        arrays = {key: array[array_rows] for key, array in self.non_tensor_batch.items()}
        return replace(self, columns=columns, non_tensor_batch=arrays)

    def split(self, size: int) -> list[DataProto]:
        """Split into parts of `size` rows, the last may be smaller. meta_info goes to all of them."""
        if size < 1:
            raise ProtocolError(f"split into parts of {size} rows: a part has at least one")
        return [self[start : start + size] for start in range(0, len(self), size)]

    # Columns.

    def ragged(self, key: str) -> Ragged:
        """Return a column that has a value for each token.

        Raises:
            ProtocolError: there is none of that name, or the method does not declare it, or it is not ragged.
        """
        column = self._column(key, self.columns)
        if not isinstance(column, Ragged):
            raise ProtocolError(f"column {key!r} is a tensor {list(column.shape)}: read it with tensor()")
        return column

    def padded(self, key: str, width: int | None = None) -> Tensor:
        """Return a ragged column as a tensor [B, R], see `Ragged.padded`."""
        return self.ragged(key).padded(width)

    def tensor(self, key: str) -> Tensor:
        """Return a tensor [B, ...] that is not ragged.

        Raises:
            ProtocolError: there is none of that name, or the method does not declare it, or it is ragged.
        """
        column: Ragged | Tensor = self._column(key, self.columns)
        if isinstance(column, Ragged):
            raise ProtocolError(f"column {key!r} is ragged: read it with ragged(), or with padded() as a tensor [B, R]")
        return column

    def array(self, key: str) -> ObjectArray:
        """Return a column of objects.

        Raises:
            ProtocolError: there is none of that name, or the method does not declare it.
        """
        found: ObjectArray = self._column(key, self.non_tensor_batch)
        return found

    def _column(self, key: str, columns: Mapping[str, Any]) -> Any:
        if key in columns:
            return columns[key]
        if key in self.not_sent:
            raise ProtocolError(f"column {key!r} was not sent: add it to `reads` in the method's @register")
        raise ProtocolError(f"no column {key!r} of this kind; there are {sorted(columns)}")

    def prompts(self) -> Ragged:
        """Return the tokens of the prompts, from input_ids and response_mask."""
        tokens = self.ragged(Keys.INPUT_IDS)
        return tokens.head(tokens.lengths - self.ragged(Keys.RESPONSE_MASK).lengths)

    def responses(self) -> Ragged:
        """Return the tokens of the responses, from input_ids and response_mask."""
        return self.ragged(Keys.INPUT_IDS).tail(self.ragged(Keys.RESPONSE_MASK).lengths)

    def select(self, keys: Sequence[str]) -> DataProto:
        """Return the batch with only these tensor columns."""
        return replace(self, columns={key: self._column(key, self.columns) for key in keys}, non_tensor_batch={})

    def with_fields(
        self,
        tensors: Mapping[str, Ragged | Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | ObjectArray] | None = None,
    ) -> DataProto:
        """Return the batch with these columns added or replaced."""
        arrays = {key: object_array(value) for key, value in (non_tensors or {}).items()}
        return replace(
            self, columns={**self.columns, **(tensors or {})}, non_tensor_batch={**self.non_tensor_batch, **arrays}
        )
