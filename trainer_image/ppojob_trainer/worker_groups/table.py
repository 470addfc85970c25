"""A batch whose rows stay in the workers; the controller handles it instead of tensors.

A worker's result stays in the object store of its node, divided into blocks of rows. A `Table` knows, for every row,
which rank's result has it and at which position. Joining columns, taking and reordering rows are arithmetic on row
numbers, and are possible before the results exist. A receiver gets `Rows`, and `pull` fetches only the blocks with its
rows, directly from the producer's node.

    prompts   = data.call(DataWorker.next_batch, 3)               1 result
    rollout   = rollouts.call(RolloutWorker.generate, prompts)    2 results, of 8 rows each
    batch     = prompts.union(rollout)                            16 rows, nothing moved
    actor 1   gets Rows(8..15 of both), pulls the blocks with these rows

Called by `worker_group` (driver side) and `worker_process` (worker side). No tensor goes through the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import ray
import torch
from ray import ObjectRef

from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.worker_groups.partition import Share

__all__ = ["Rows", "StoredRows", "Table", "store_rows"]

MAX_BLOCKS = 32
"""Blocks of one result. With more, a receiver of scattered rows would fetch less, but each block costs an object."""
MIN_BLOCK_BYTES = 1_048_576
"""For a smaller object, the overhead for its writer and each reader exceeds the time to copy its bytes."""

Positions: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class StoredRows:
    """A worker's answer in place of a DataProto: references to its rows, and small values for the controller.

    starts: the first row of each block, and the number of rows at the end. sums: for each row, the sum over its tokens
    of each mask (so the tokens of the whole sequence and of the response) and of the scores, if the batch has them.
    """

    blocks: tuple[ObjectRef[DataProto], ...]
    starts: tuple[int, ...]
    sums: Mapping[str, list[float]]
    metrics: Mapping[str, list[float]]

    @property
    def num_rows(self) -> int:
        """Number of rows of this result, copies included."""
        return self.starts[-1]


def store_rows(batch: DataProto) -> StoredRows:
    """Put a result into the node's object store in at most `MAX_BLOCKS` blocks.

    The blocks are put one by one because Ray sends a small return value to the caller itself, and the caller is the
    controller.
    """
    metrics = batch.meta_info.get(Meta.METRICS, {})
    plain = DataProto(
        batch.batch,
        batch.non_tensor_batch,
        {key: value for key, value in batch.meta_info.items() if key != Meta.METRICS},
    )
    size = rows_of_block(len(plain), plain.num_bytes)
    starts = (*range(0, len(plain), size), len(plain))
    blocks = tuple(ray.put(part) for part in plain.split(size))
    return StoredRows(blocks, starts, _sums(plain), metrics)


def rows_of_block(num_rows: int, num_bytes: int) -> int:
    """Return the number of rows of each block, so that blocks are neither too many nor too small."""
    of_many = -(-num_rows // MAX_BLOCKS)
    of_small = -(-num_rows * MIN_BLOCK_BYTES // max(1, num_bytes))
    return max(1, of_many, min(num_rows, of_small))


def _sums(batch: DataProto) -> dict[str, list[float]]:
    tensors = batch.tensors()
    return {
        key: tensors[key].double().sum(dim=1).tolist()
        for key in (Keys.ATTENTION_MASK, Keys.RESPONSE_MASK, Keys.TOKEN_LEVEL_SCORES)
        if key in tensors
    }


@dataclass(frozen=True)
class Source:
    """One group's results, and the location of each row of the table in them: result number and position, int64 [rows].

    replaces: whether its columns replace those of the same name in earlier sources.
    """

    results: tuple[ObjectRef[StoredRows], ...]
    result_of: Positions
    position_of: Positions
    replaces: bool = False

    def take(self, rows: Sequence[int]) -> Source:
        """Return the source of these rows only, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        return replace(self, result_of=self.result_of[index], position_of=self.position_of[index])

    def compact(self) -> Source:
        """Return the source without the results that no row needs, so that a receiver does not wait for them."""
        used = np.unique(self.result_of)
        numbers = np.searchsorted(used, self.result_of)
        return replace(self, results=tuple(self.results[number] for number in used), result_of=numbers)


@dataclass(frozen=True)
class Rows:
    """One rank's part of a table, as it is sent to the rank: references and row numbers."""

    sources: tuple[Source, ...]
    padding: frozenset[int]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def pull(self, timeout_s: float) -> DataProto:
        """Fetch the rows and join their columns. The response mask of copies is 0.

        Raises:
            ray.exceptions.GetTimeoutError: a source was not available in time.
        """
        parts = [_pull(source, timeout_s) for source in self.sources]
        batch = parts[0]
        for source, part in zip(self.sources[1:], parts[1:], strict=True):
            batch = batch.with_fields(part.tensors(), part.non_tensor_batch) if source.replaces else batch.union(part)
        batch = DataProto(batch.batch, batch.non_tensor_batch, {**batch.meta_info, **self.meta})
        if self.padding and Keys.RESPONSE_MASK in batch.tensors():
            mask = batch.tensor(Keys.RESPONSE_MASK).clone()
            mask[torch.tensor(sorted(self.padding))] = 0
            batch = batch.with_fields({Keys.RESPONSE_MASK: mask})
        return batch


def _pull(source: Source, timeout_s: float) -> DataProto:
    results = ray.get(list(source.results), timeout=timeout_s)
    wanted: list[ObjectRef[DataProto]] = []
    # For each row of the table, its row in the concatenation of the fetched blocks.
    places = np.empty(len(source.result_of), dtype=np.int64)
    fetched_rows = 0
    for number, result in enumerate(results):
        mine = np.flatnonzero(source.result_of == number)
        positions = source.position_of[mine]
        blocks = np.searchsorted(result.starts, positions, side="right") - 1
        for block in np.unique(blocks):
            start, stop = result.starts[block], result.starts[block + 1]
            inside = blocks == block
            places[mine[inside]] = positions[inside] - start + fetched_rows
            fetched_rows += stop - start
            wanted.append(result.blocks[block])
    return DataProto.concat(ray.get(wanted, timeout=timeout_s))[places]


def _one_below_the_other(sources: Sequence[Source]) -> Source:
    starts = np.cumsum([0, *(len(source.results) for source in sources)])
    return Source(
        tuple(result for source in sources for result in source.results),
        np.concatenate([source.result_of + start for source, start in zip(sources, starts, strict=False)]),
        np.concatenate([source.position_of for source in sources]),
        sources[0].replaces,
    )


@dataclass(frozen=True)
class Table:
    """Rows in canonical order (prompts in the order of the data, a prompt's samples consecutive), columns by source."""

    sources: tuple[Source, ...]
    sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """`StoredRows.sums` of the known sources, for every row."""
    metrics: Mapping[str, list[float]] = field(default_factory=dict)
    """Metrics of the call that created this table, of all ranks in order."""

    @classmethod
    def of_stored(cls, stored: StoredRows) -> Table:
        """Return a table of one result that is available already."""
        share = Share(tuple(range(stored.num_rows)))
        return cls.of_results([ray.put(stored)], [share]).known([stored])

    @classmethod
    def of_results(cls, results: Sequence[ObjectRef[StoredRows]], shares: Sequence[Share]) -> Table:
        """Return the results of a call over `shares`, in the order of the rows that were sent."""
        num_rows = sum(len(share.rows) - len(share.padding) for share in shares)
        result_of = np.empty(num_rows, dtype=np.int64)
        position_of = np.empty(num_rows, dtype=np.int64)
        for number, share in enumerate(shares):
            for position, row in enumerate(share.rows):
                if position not in share.padding:
                    result_of[row], position_of[row] = number, position
        return cls((Source(tuple(results), result_of, position_of),))

    def __len__(self) -> int:
        return len(self.sources[0].result_of)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each sequence, prompt and response.

        Raises:
            ValueError: no available source has sequences.
        """
        if Keys.ATTENTION_MASK not in self.sums:
            raise ValueError("the lengths of this table's rows are not known: await the rollout first")
        return tuple(map(int, self.sums[Keys.ATTENTION_MASK]))

    def union(self, *others: Table) -> Table:
        """Return one table with the columns of all tables.

        A column that two of them have must be equal in both, unless the later table is `replacing`.

        Raises:
            ValueError: the tables do not have the same number of rows.
        """
        for other in others:
            if len(other) != len(self):
                raise ValueError(f"union of {len(self)} rows with {len(other)}: they are not of the same sequences")
        tables = (self, *others)
        sums: dict[str, tuple[float, ...]] = {}
        for table in tables:
            replaces = all(source.replaces for source in table.sources)
            sums |= {key: value for key, value in table.sums.items() if replaces or key not in sums}
        return Table(tuple(source for table in tables for source in table.sources), sums)

    def replaced_by(self, other: Table) -> Table:
        """Return the columns of both tables; `other` wins where both have a column.

        Raises:
            ValueError: the tables do not have the same number of rows.
        """
        return self.union(other.replacing())

    def replacing(self) -> Table:
        """Return a table whose columns replace those of the same name when it is joined to another one."""
        return replace(self, sources=tuple(replace(source, replaces=True) for source in self.sources))

    def take(self, rows: Sequence[int]) -> Table:
        """Return these rows, in this order; a row may occur several times."""
        sums = {key: tuple(value[row] for row in rows) for key, value in self.sums.items()}
        return Table(tuple(source.take(rows) for source in self.sources), sums)

    def known(self, stored: Sequence[StoredRows]) -> Table:
        """Return the table of one source with the sums and metrics of its results."""
        (source,) = self.sources
        sums = {
            key: tuple(
                stored[number].sums[key][position]
                for number, position in zip(source.result_of, source.position_of, strict=True)
            )
            for key in stored[0].sums
        }
        metrics: dict[str, list[float]] = {}
        for result in stored:
            for name, values in result.metrics.items():
                metrics.setdefault(name, []).extend(values)
        return Table(self.sources, sums, metrics)

    def join_rows(self, others: Sequence[Table], numbers: Sequence[int]) -> Table:
        """Return the rows of this table and of the others as one table.

        All have the same columns, from the same number of sources. Metrics are joined in the order of the tables.

        Args:
            numbers: row numbers in the result, for the rows of this table and then of `others` in order.

        Raises:
            ValueError: the tables differ in their number of sources, or `numbers` is not a permutation of all rows.
        """
        tables = (self, *others)
        if len({len(table.sources) for table in tables}) != 1:
            raise ValueError(
                f"tables of {[len(table.sources) for table in tables]} sources cannot be one below the other"
            )
        columns = zip(*(table.sources for table in tables), strict=True)
        sums = {
            key: tuple(value for table in tables for value in table.sums[key])
            for key in self.sums
            if all(key in table.sums for table in tables)
        }
        metrics: dict[str, list[float]] = {}
        for table in tables:
            for name, values in table.metrics.items():
                metrics.setdefault(name, []).extend(values)
        joined = Table(tuple(_one_below_the_other(sources) for sources in columns), sums)
        if sorted(numbers) != list(range(len(joined))):
            raise ValueError(f"join_rows needs a number for each of {len(joined)} rows, got {list(numbers)[:16]}")
        joined = joined.take(np.argsort(numbers).tolist())
        return replace(joined, metrics=metrics)

    def reorder(self, order: Sequence[int]) -> Table:
        """Return the rows in the order of `order`.

        Raises:
            ValueError: `order` is not a permutation of the rows.
        """
        if sorted(order) != list(range(len(self))):
            raise ValueError(f"reorder needs a permutation of 0..{len(self) - 1}, got {list(order)[:16]}")
        return self.take(order)

    def rows(self, share: Share, meta: Mapping[str, Any] | None = None) -> Rows:
        """Return the rows that are sent to the rank with this share."""
        sources = tuple(source.take(share.rows).compact() for source in self.sources)
        return Rows(sources, share.padding, meta or {})
