"""A batch whose rows stay in the workers; the controller handles it instead of tensors.

A worker's result stays in the object store of its node (`stored_rows`). A `Table` knows, for every row, which rank's
result has it and at which position. Joining columns, taking and reordering rows are arithmetic on row numbers, and are
possible before the results exist. A receiver gets `Rows`, and `pull` fetches only the columns that its method reads,
and only the blocks with its rows, directly from the producer's node.

    prompts   = data.call(DataWorker.next_batch, 3)               1 result
    rollout   = rollouts.call(RolloutWorker.generate, prompts)    2 results, of 8 rows each
    batch     = prompts.union(rollout)                            16 rows, nothing moved
    actor 1   gets Rows(8..15 of both), pulls the blocks with these rows

Called by `worker_group` (driver side) and `worker_process` (worker side). No tensor goes through the controller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import ray
import torch
from ray import ObjectRef

from ppojob_trainer.protocol import DataProto, Keys, ProtocolError
from ppojob_trainer.protocol.wire import PackedColumn, Piece, gather
from ppojob_trainer.worker_groups.partition import Share
from ppojob_trainer.worker_groups.stored_rows import StoredColumn, StoredRows

__all__ = ["Pulled", "Rows", "Table"]

Positions: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


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
class Pulled:
    """Rows in this process. num_bytes: of the blocks that were fetched for them."""

    batch: DataProto
    num_bytes: int


@dataclass(frozen=True)
class Rows:
    """One rank's part of a table, as it is sent to the rank: references, row numbers, and the names of the columns.

    reads: the columns that the method reads, as far as the table has them; None: all columns.
    """

    sources: tuple[Source, ...]
    padding: frozenset[int]
    meta: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] | None = None

    def pull(self, timeout_s: float) -> Pulled:
        """Fetch the columns of the rows. The response mask of copies is False.

        Raises:
            ProtocolError: two sources have the same column and neither replaces the other, ranks computed different
                columns, or there is none of those in `reads`.
            ray.exceptions.GetTimeoutError: a source was not available in time.
        """
        found = self._find(timeout_s)
        wanted = {name: blocks for name, blocks in found.items() if self.reads is None or name in self.reads}
        if not wanted:
            raise ProtocolError(f"the batch has none of {sorted(self.reads or ())}; it has {sorted(found)}")
        fetched = iter(ray.get([block.ref for blocks in wanted.values() for block in blocks], timeout=timeout_s))
        num_rows = len(self.sources[0].result_of)
        columns = {
            name: gather(name, [Piece(next(fetched), block.rows, block.to) for block in blocks], num_rows)
            for name, blocks in wanted.items()
        }
        batch = DataProto.of_columns(columns, self.meta, found.keys() - wanted.keys())
        if self.padding and Keys.RESPONSE_MASK in batch:
            mask = batch.ragged(Keys.RESPONSE_MASK)
            is_copy = torch.isin(mask.row_of, torch.tensor(sorted(self.padding)))
            batch = batch.with_fields({Keys.RESPONSE_MASK: mask.with_values(mask.values & ~is_copy)})
        return Pulled(batch, sum(block.size for blocks in wanted.values() for block in blocks))

    def _find(self, timeout_s: float) -> dict[str, list[_Block]]:
        """Return the blocks of each column that have rows of this part."""
        results = iter(ray.get([result for source in self.sources for result in source.results], timeout=timeout_s))
        found: dict[str, list[_Block]] = {}
        for source in self.sources:
            stored = [next(results) for _ in source.results]
            columns = _blocks_of(source, stored)
            if both := sorted(found.keys() & columns.keys() if not source.replaces else ()):
                raise ProtocolError(f"two tables have a column {both[0]!r}: join them with replaced_by()")
            found |= columns
        return found


@dataclass(frozen=True)
class _Block:
    """A block of a column: these of its rows become the rows `to` of a part."""

    ref: ObjectRef[PackedColumn]
    size: int
    rows: Positions
    to: Positions


def _blocks_of(source: Source, stored: Sequence[StoredRows]) -> dict[str, list[_Block]]:
    names = stored[0].columns.keys()
    for result in stored:
        if result.columns.keys() != names:
            different = sorted(result.columns.keys() ^ names)
            raise ProtocolError(f"only some ranks returned the columns {different}: return the same columns from all")
    found: dict[str, list[_Block]] = {name: [] for name in names}
    for number, result in enumerate(stored):
        to = np.flatnonzero(source.result_of == number)
        for name, column in result.columns.items():
            found[name] += _blocks_with(column, source.position_of[to], to)
    return found


def _blocks_with(column: StoredColumn, positions: Positions, to: Positions) -> Iterator[_Block]:
    blocks = np.searchsorted(column.starts, positions, side="right") - 1
    for block in np.unique(blocks):
        inside = blocks == block
        rows = positions[inside] - column.starts[block]
        yield _Block(column.blocks[block], column.sizes[block], rows, to[inside])


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
        if Keys.INPUT_IDS not in self.sums:
            raise ValueError("the lengths of this table's rows are not known: await the rollout first")
        return tuple(map(int, self.sums[Keys.INPUT_IDS]))

    def union(self, *others: Table) -> Table:
        """Return one table with the columns of all tables.

        No two of them may have the same column, unless the later table is `replacing`; the rows' receiver checks it.

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

    def rows(self, share: Share, meta: Mapping[str, Any] | None = None, reads: frozenset[str] | None = None) -> Rows:
        """Return the rows that are sent to the rank with this share, with the columns in `reads` (None: all)."""
        sources = tuple(source.take(share.rows).compact() for source in self.sources)
        return Rows(sources, share.padding, meta or {}, reads)
