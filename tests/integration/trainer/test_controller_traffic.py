"""What passes the controller in a step: references, row numbers, lengths and metrics; never a column.

Everything that Ray packs or unpacks in this process is counted, arguments and answers, small or large. The calls are
those of a PPO step, on real worker groups; the workers make columns of a given length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from ray._private.serialization import SerializationContext

from ppojob_trainer.main.connection import connected
from ppojob_trainer.protocol import Keys
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.partition import Share
from ppojob_trainer.worker_groups.placement import place
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from tests.integration.trainer.test_worker_groups_on_ray import IMPORTABLE, spec_of
from tests.integration.trainer.traffic_workers import ColumnWorker

pytestmark = pytest.mark.timeout(600)

ROWS = 64
SHORT, LONG = 64, 8192
COLUMNS = (Keys.OLD_LOG_PROBS, Keys.VALUES, Keys.REF_LOG_PROB, Keys.TOKEN_LEVEL_SCORES)
FLOAT32_BYTES = 4


@dataclass
class Traffic:
    """Bytes that this process gave to Ray, and got from it."""

    sent: int = 0
    received: int = 0

    @property
    def total(self) -> int:
        return self.sent + self.received


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Count what is packed and unpacked within the block."""
    traffic = Traffic()
    pack, unpack = SerializationContext.serialize, SerializationContext.deserialize_objects

    def packed(self: Any, value: Any) -> Any:
        found = pack(self, value)
        traffic.sent += found.total_bytes
        return found

    def unpacked(self: Any, serialized: Any, *args: Any) -> Any:
        traffic.received += sum(len(data) for data, *_ in serialized if data is not None)
        return unpack(self, serialized, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SerializationContext, "serialize", packed)
        patch.setattr(SerializationContext, "deserialize_objects", unpacked)
        yield traffic


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup[ColumnWorker]]:
    """Two ranks, which stand for all roles: who computes a column does not change how it travels."""
    spec = spec_of(gpus_of_actor=2)
    with connected(spec):
        pool = asyncio.run(place(spec, 60))["actor"]
        launcher = Launcher(tmp_path_factory.mktemp("logs"), 120.0)
        started = launcher.start("columns", ColumnWorker, pool, pool.bundles, environment=IMPORTABLE)
        asyncio.run(wait_until_up([started]))
        yield started
        pool.release()


async def one_step(group: WorkerGroup[ColumnWorker], length: int) -> Table:
    """The calls of a PPO step in their order."""
    prompts = Table.of_stored(await group.call(ColumnWorker.next_batch, ROWS))
    rollout = await group.call(ColumnWorker.generate_sequences, prompts, length=length)
    batch = prompts.union(rollout)
    parts = await asyncio.gather(*(group.call(ColumnWorker.compute, batch, column=column) for column in COLUMNS))
    batch = batch.union(*parts)
    batch = batch.union(await group.call(ColumnWorker.compute, batch, column=Keys.ADVANTAGES))
    columns = (*COLUMNS, Keys.ADVANTAGES)
    for _ in ("critic", "actor"):
        updated = await group.call(ColumnWorker.update, batch, columns=columns)
        assert updated == {"numbers/max": len(columns) * ROWS / len(group) * length}
    return batch


async def measured(group: WorkerGroup[ColumnWorker], length: int, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    # Ray sends what it sends once for each function and class, the first time.
    await one_step(group, length)
    with counted(monkeypatch) as traffic:
        await one_step(group, length)
    return traffic


async def test_bytes_through_the_controller_do_not_grow_with_the_sequences(
    group: WorkerGroup[ColumnWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = await measured(group, SHORT, monkeypatch), await measured(group, LONG, monkeypatch)

    column = ROWS * LONG * FLOAT32_BYTES
    print(f"{ROWS} rows: {short} at {SHORT} tokens, {long} at {LONG}; one column is {column} bytes")
    # Lengths are larger numbers: a byte or two for each row and mask, and again wherever an answer goes. Results of
    # many bytes lie in more blocks, up to MAX_BLOCKS, with a reference each.
    assert abs(long.total - short.total) < column / 50
    # A reference carries the small answer that it stands for, so which block holds which rows is sent with each call.
    assert long.total < 16 * 1024 * ROWS
    assert long.total < (len(COLUMNS) + 1) * column / 16
    assert min(long.sent, long.received) > 8 * ROWS, "the counter sees both ways"


async def test_the_counter_sees_a_column_that_is_fetched(
    group: WorkerGroup[ColumnWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await one_step(group, LONG)

    with counted(monkeypatch) as traffic:
        batch.rows(Share(tuple(range(ROWS)))).pull(60)

    assert traffic.received > (len(COLUMNS) + 1) * ROWS * LONG * FLOAT32_BYTES
