"""Rows that a rank fetches from stored results: which columns and blocks, and what they become. No Ray."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ppojob_trainer.protocol import DataProto, Keys, Meta, ProtocolError, Ragged, rollout_batch
from ppojob_trainer.worker_groups import stored_rows as stored_rows_module
from ppojob_trainer.worker_groups import table as table_module
from ppojob_trainer.worker_groups.partition import Share
from ppojob_trainer.worker_groups.stored_rows import StoredRows, counted_stores, store_rows
from ppojob_trainer.worker_groups.table import Table

LONG = 200_000


@dataclass(frozen=True)
class Ref:
    """Stands for Ray's reference: the pickled object, its buffers apart and read-only, as in the object store."""

    data: bytes
    buffers: tuple[bytes, ...]


class Store:
    """Stands for Ray."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def put(self, value: Any) -> Ref:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return Ref(data, tuple(bytes(buffer.raw()) for buffer in buffers))

    def get(self, refs: Sequence[Ref], timeout: float) -> list[Any]:
        self.fetched.append(len(refs))
        return [pickle.loads(ref.data, buffers=ref.buffers) for ref in refs]


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    fake = Store()
    for module in (stored_rows_module, table_module):
        monkeypatch.setattr(module, "ray", fake)
    return fake


def table_of(*stored: StoredRows) -> Table:
    """Return the rows of these results, one below the other."""
    shares, first = [], 0
    for result in stored:
        shares.append(Share(tuple(range(first, first + result.num_rows))))
        first += result.num_rows
    return Table.of_results([table_module.ray.put(result) for result in stored], shares).known(stored)


def rollout() -> Table:
    first = rollout_batch([[5, 6, 7], [8]], [[1, 2], [3]])
    second = rollout_batch([[9]], [[4, 4, 4]])
    return table_of(*(store_rows(DataProto.from_dict(columns)) for columns in (first, second)))


def everything(table: Table) -> DataProto:
    return table.rows(Share(tuple(range(len(table))))).pull(1).batch


def test_rows_of_several_results_in_any_order() -> None:
    batch = rollout().rows(Share((2, 0))).pull(1).batch

    assert batch.ragged(Keys.INPUT_IDS).to_lists() == [[9, 4, 4, 4], [5, 6, 7, 1, 2]]
    assert batch.responses().to_lists() == [[4, 4, 4], [1, 2]]


def test_lengths_and_sums_are_known_without_fetching() -> None:
    scores = Ragged.from_rows([[0.0, 0.5], [1.0], [0.0, 0.0, 2.0]], torch.float32)
    table = rollout().union(table_of(store_rows(DataProto.from_dict({Keys.TOKEN_LEVEL_SCORES: scores}))))

    assert table.tokens == (5, 2, 4)
    assert table.sums[Keys.RESPONSE_MASK] == (2, 1, 3)
    assert table.sums[Keys.TOKEN_LEVEL_SCORES] == pytest.approx((0.5, 1, 2))


def test_the_response_mask_of_copies_is_false() -> None:
    batch = rollout().rows(Share((1, 0, 0), frozenset({2}))).pull(1).batch

    assert batch.ragged(Keys.RESPONSE_MASK).to_lists() == [[True], [True, True], [False, False]]
    assert batch.responses().to_lists() == [[3], [1, 2], [1, 2]]


def test_only_declared_columns_are_fetched_and_others_are_named(store: Store) -> None:
    reads = frozenset({Keys.RESPONSE_MASK, Keys.OLD_LOG_PROBS})
    table = rollout()
    store.fetched.clear()

    pulled = table.rows(Share((0, 1, 2)), {"scale": 2}, reads).pull(1)

    assert store.fetched == [2, 2], "two results, and a block of each"
    assert pulled.num_bytes == (3 + 2 * 8) + (3 + 8)
    assert pulled.batch.meta_info == {"scale": 2}
    with pytest.raises(ProtocolError, match="'input_ids' was not sent: add it to `reads`"):
        pulled.batch.ragged(Keys.INPUT_IDS)
    with pytest.raises(ProtocolError, match="no column 'old_log_probs'"):
        pulled.batch.ragged(Keys.OLD_LOG_PROBS)


def test_a_batch_without_any_declared_column_is_refused() -> None:
    with pytest.raises(
        ProtocolError, match=r"the batch has none of \['values'\]; it has \['input_ids', 'response_mask'\]"
    ):
        rollout().rows(Share((0,)), None, frozenset({Keys.VALUES})).pull(1)


def test_only_blocks_with_wanted_rows_are_fetched(store: Store) -> None:
    values = Ragged(torch.arange(8 * LONG, dtype=torch.float32), torch.full((8,), LONG))
    table = table_of(store_rows(DataProto.from_dict({"wide": values, "number": torch.arange(8)})))
    store.fetched.clear()

    pulled = table.rows(Share((6, 1))).pull(1)

    # 0.8 MB a row: two rows in a block. The other column has one block.
    assert store.fetched == [1, 3]
    assert pulled.num_bytes == 2 * (2 * LONG * 4 + 2 * 8) + 8 * 8
    assert pulled.batch.tensor("number").tolist() == [6, 1]
    assert [int(row[0]) for row in pulled.batch.ragged("wide").rows()] == [6 * LONG, LONG]


def test_rows_may_be_written_to() -> None:
    batch = everything(rollout())

    batch.ragged(Keys.INPUT_IDS).values.zero_()

    assert everything(rollout()).ragged(Keys.INPUT_IDS).to_lists()[1] == [8, 3]


def test_a_column_replaces_an_earlier_one_only_if_it_is_meant_to(store: Store) -> None:
    masked = Ragged.from_rows([[True, False], [False], [True] * 3], torch.bool)
    later = table_of(store_rows(DataProto.from_dict({Keys.RESPONSE_MASK: masked})))
    table = rollout()

    store.fetched.clear()
    assert everything(table.replaced_by(later)).ragged(Keys.RESPONSE_MASK).to_lists() == masked.to_lists()
    assert store.fetched == [3, 3], "the column that is replaced is not fetched"
    with pytest.raises(ProtocolError, match=r"two tables have a column 'response_mask': join them with replaced_by"):
        everything(table.union(later))


def test_ranks_that_return_different_columns_are_refused() -> None:
    one, two = (store_rows(DataProto.from_dict({name: torch.zeros(1)})) for name in ("a", "b"))

    with pytest.raises(ProtocolError, match=r"only some ranks returned the columns \['a', 'b'\]"):
        Table.of_results([table_module.ray.put(one), table_module.ray.put(two)], [Share((0,)), Share((1,))]).rows(
            Share((0, 1))
        ).pull(1)


def test_metrics_go_to_the_controller_and_bytes_are_counted() -> None:
    with counted_stores() as counter:
        stored = store_rows(DataProto.from_dict({"a": torch.zeros(4)}, meta_info={Meta.METRICS: {"x": [1.0]}, "y": 2}))

    assert stored.metrics == {"x": [1.0]}
    assert counter.num_bytes == stored.num_bytes == 16
    assert everything(table_of(stored)).meta_info == {}
