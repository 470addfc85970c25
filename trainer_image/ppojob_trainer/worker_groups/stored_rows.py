"""A worker's result in the object store of its node: each column by itself, divided into blocks of rows.

So a receiver fetches only the columns that it reads, and only the blocks with its rows. Called by `worker_process` and
by the roles whose methods return rows in parts; `table` keeps track of where each row is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import ray
from ray import ObjectRef

from ppojob_trainer.protocol import DataProto, Keys, Meta, Ragged
from ppojob_trainer.protocol.wire import Column, PackedColumn, num_bytes, pack

__all__ = ["NEWER_TOKENS", "StoredColumn", "StoredRows", "counted_stores", "rows_of_block", "store_rows"]

MAX_BLOCKS = 32
"""Blocks of one column. With more, a receiver of scattered rows would fetch less, but each block costs an object."""
NEWER_TOKENS = "newer_tokens"
"""Name in `StoredRows.sums`: tokens of a response that newer weights sampled than its first token."""
MIN_BLOCK_BYTES = 1_048_576
"""For a smaller object, the overhead for its writer and each reader exceeds the time to copy its bytes."""


@dataclass(frozen=True)
class StoredColumn:
    """References to a column's blocks.

    starts: the first row of each block, and the number of rows at the end. sizes: bytes of each block.
    """

    blocks: tuple[ObjectRef[PackedColumn], ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredRows:
    """A worker's answer in place of a DataProto: references to its columns, and small values for the controller.

    num_rows: rows of this result, copies included. sums: for each row, the number of tokens of input_ids, and the sums
    of response_mask and of the scores, if the batch has them; of rollout_versions the first value, and `NEWER_TOKENS`,
    the number of values above it; of reward_error 1 if there is one, else 0.
    """

    columns: Mapping[str, StoredColumn]
    num_rows: int
    sums: Mapping[str, list[float]]
    metrics: Mapping[str, list[float]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(sum(column.sizes) for column in self.columns.values())


@dataclass(eq=False)
class Stored:
    """Bytes that this process stored."""

    num_bytes: int = 0


_counters: list[Stored] = []


@contextmanager
def counted_stores() -> Iterator[Stored]:
    """Count what `store_rows` stores within the block, in any thread."""
    counter = Stored()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def store_rows(batch: DataProto) -> StoredRows:
    """Put a result into the node's object store, each column in at most `MAX_BLOCKS` blocks.

    Of meta_info, only the metrics are kept. The blocks are put one by one because Ray sends a small return value to the
    caller itself, and the caller is the controller.
    """
    columns = {name: _store_column(column) for name, column in batch.items()}
    stored = StoredRows(columns, len(batch), _sums(batch), batch.meta_info.get(Meta.METRICS, {}))
    for counter in _counters:
        counter.num_bytes += stored.num_bytes
    return stored


def _store_column(column: Column) -> StoredColumn:
    size = rows_of_block(len(column), num_bytes(column))
    starts = (*range(0, len(column), size), len(column))
    parts = [_rows_of(column, slice(*ends)) for ends in pairwise(starts)]
    return StoredColumn(tuple(ray.put(pack(part)) for part in parts), starts, tuple(map(num_bytes, parts)))


def _rows_of(column: Column, rows: slice) -> Column:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


def rows_of_block(num_rows: int, num_bytes: int) -> int:
    """Return the number of rows of each block, so that blocks are neither too many nor too small."""
    of_many = -(-num_rows // MAX_BLOCKS)
    of_small = -(-num_rows * MIN_BLOCK_BYTES // max(1, num_bytes))
    return max(1, of_many, min(num_rows, of_small))


def _sums(batch: DataProto) -> dict[str, list[float]]:
    sums = {
        key: batch.ragged(key).sums().tolist()
        for key in (Keys.RESPONSE_MASK, Keys.TOKEN_LEVEL_SCORES)
        if key in batch.columns
    }
    if Keys.ROLLOUT_VERSIONS in batch.columns:
        versions = batch.ragged(Keys.ROLLOUT_VERSIONS)
        first = versions.values[versions.starts]
        sums[Keys.ROLLOUT_VERSIONS] = first.double().tolist()
        sums[NEWER_TOKENS] = versions.with_values(versions.values > first[versions.row_of]).sums().tolist()
    if Keys.INPUT_IDS in batch.columns:
        sums[Keys.INPUT_IDS] = batch.ragged(Keys.INPUT_IDS).lengths.double().tolist()
    if Keys.REWARD_ERROR in batch:
        sums[Keys.REWARD_ERROR] = [float(bool(error)) for error in batch.array(Keys.REWARD_ERROR)]
    return sums
