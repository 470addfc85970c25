"""Groups on a Ray of this machine: every dispatch mode, tables, futures, lost processes, pools that do not fit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.main.connection import connected
from ppojob_trainer.main.failures import failure_record
from ppojob_trainer.protocol import DataProto, Keys, ProtocolError, Ragged
from ppojob_trainer.worker_groups import table as table_module
from ppojob_trainer.worker_groups.errors import (
    CallTimeoutError,
    GPUFaultError,
    PoolNotPlacedError,
    WorkerFailedError,
    WorkerLostError,
)
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.partition import Share, spread
from ppojob_trainer.worker_groups.placement import PlacedPool, place
from ppojob_trainer.worker_groups.stored_rows import store_rows
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from tests.integration.trainer.ray_workers import SumWorker

pytestmark = pytest.mark.timeout(900)

Group = WorkerGroup[SumWorker]

# A worker's class is found by its module's name, in Ray's processes too.
IMPORTABLE = {"PYTHONPATH": str(Path(__file__).parent)}


def spec_of(gpus_of_actor: int) -> PPOJobSpec:
    return resolve(
        parse_spec(
            {
                "image": "i",
                "device": "CPU",
                "model": {"actor": {"path": "/m"}},
                "data": {
                    "train": {"reasoningGym": {"task": "products"}},
                    "trainBatchSize": 256,
                },
                "reward": {"function": {"module": "r"}},
                "pools": [{"name": "actor", "gpusPerNode": gpus_of_actor}, {"name": "critic", "gpusPerNode": 1}],
                "placement": {"actor": "actor", "critic": "critic"},
                "storage": {"claimName": "c"},
            }
        )
    )


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, PlacedPool]]:
    spec = spec_of(gpus_of_actor=2)
    with connected(spec):
        placed = asyncio.run(place(spec, 300))
        yield placed
        for pool in placed.values():
            pool.release()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def group(pools: dict[str, PlacedPool], logs: Path) -> Group:
    pool = pools["actor"]
    started = Launcher(logs, 300.0).start("sum", SumWorker, pool, pool.bundles, environment=IMPORTABLE)
    asyncio.run(wait_until_up([started]))
    return started


@pytest.fixture(scope="module")
def peers(pools: dict[str, PlacedPool], logs: Path) -> Group:
    """Two data-parallel ranks of two peers each."""
    pool = pools["actor"]
    started = Launcher(logs, 300.0).start("peers", SumWorker, pool, pool.bundles * 2, environment=IMPORTABLE)
    asyncio.run(wait_until_up([started]))
    return started.with_peers(2)


def table_of(num_rows: int) -> Table:
    mask = Ragged.from_rows([[True] * 2] * num_rows, torch.bool)
    return Table.of_stored(
        store_rows(DataProto.from_dict({"numbers": torch.arange(num_rows), Keys.RESPONSE_MASK: mask}))
    )


def pulled(table: Table) -> DataProto:
    """Fetch a whole table, as a rank would."""
    return table.rows(Share(tuple(range(len(table))))).pull(60).batch


async def test_one_to_all_gives_the_answers_by_rank(group: Group) -> None:
    assert await group.call(SumWorker.rank_plus, 10, times=2) == [20, 22]


def test_a_blocking_call_gives_the_answer_itself(group: Group) -> None:
    assert group.call(SumWorker.only_first) == [[0, 2]]
    assert group.call(SumWorker.own_number, [5, 7]) == [0, 7]


async def test_rank_zero_gives_one_answer(group: Group) -> None:
    first, again = await asyncio.gather(group.call(SumWorker.process_id), group.call(SumWorker.process_id))

    assert first == again


async def test_all_to_all_gives_each_rank_its_own(group: Group) -> None:
    assert await group.call(SumWorker.own, ["a", "b"]) == ["0:a", "1:b"]
    with pytest.raises(ValueError, match="own takes one argument for each of 2 ranks, got 3"):
        group.call(SumWorker.own, ["a", "b", "c"])


async def test_rows_come_back_in_the_order_in_which_they_were_sent(group: Group) -> None:
    backwards = tuple(Share(tuple(reversed(share.rows))) for share in spread(6, 2))

    found = await group.over(backwards).call(SumWorker.double, table_of(6))

    batch = pulled(found)
    assert batch.tensor("doubled").tolist() == [0, 2, 4, 6, 8, 10]
    assert batch.tensor("rank").tolist() == [0, 0, 0, 1, 1, 1]
    assert found.metrics == {"seen": [3, 3]}


async def test_peers_get_the_same_rows_and_the_first_of_them_answers(peers: Group) -> None:
    assert (len(peers), peers.num_shards) == (4, 2)
    table = table_of(5)

    found = await peers.call(SumWorker.double_together, table)
    batch = pulled(found)
    assert batch.tensor("doubled").tolist() == [0, 2, 4, 6, 8]
    assert batch.tensor("rank").tolist() == [0, 0, 0, 2, 2]
    # The second data-parallel rank has a copy, so that both have equally many.
    assert await peers.call(SumWorker.seen_together) == [[0, 1, 2]] * 2 + [[3, 4, 0]] * 2

    counted = await peers.using({"scale": 1.0}).call(SumWorker.count, table)
    assert counted["rows/max"] == 3


async def test_all_stages_of_a_pipeline_get_the_same_rows_and_the_first_answers(peers: Group) -> None:
    stages = peers.with_peers(1, num_stages=2)
    assert stages.num_shards == 2

    batch = pulled(await stages.call(SumWorker.double_together, table_of(5)))
    assert batch.tensor("doubled").tolist() == [0, 2, 4, 6, 8]
    assert batch.tensor("rank").tolist() == [0, 0, 0, 1, 1]
    assert await stages.call(SumWorker.seen_together) == [[0, 1, 2], [3, 4, 0]] * 2


async def test_a_peer_whose_answer_nobody_reads_fails_the_call(peers: Group) -> None:
    with pytest.raises(WorkerFailedError, match="peers rank 3 failed in fail_together: ZeroDivisionError: of a peer"):
        await peers.call(SumWorker.fail_together, table_of(4))


async def test_copies_that_fill_a_share_up_weigh_nothing_and_do_not_come_back(group: Group) -> None:
    using = group.using({"scale": 0.5})

    metrics = await using.call(SumWorker.count, table_of(5))
    doubled = await using.call(SumWorker.double, table_of(5))

    # 5 rows of 2 tokens on 2 ranks of 3 rows: the mean of 6 and 4.
    assert metrics == {"tokens": 5.0, "rows/max": 3.0, "scale": 0.5}
    assert pulled(doubled).tensor("doubled").tolist() == [0, 2, 4, 6, 8]


async def test_columns_of_several_groups_are_joined_by_row(group: Group) -> None:
    table = table_of(7)

    doubled = await group.call(SumWorker.double, table)
    joined = table.union(doubled).reorder([6, 0, 5, 1, 4, 2, 3])

    batch = pulled(joined)
    assert batch.tensor("numbers").tolist() == [6, 0, 5, 1, 4, 2, 3]
    assert torch.equal(batch.tensor("doubled"), 2 * batch.tensor("numbers"))


async def test_a_future_feeds_another_call_before_it_is_there(group: Group, tmp_path: Path) -> None:
    both_are_sent = tmp_path / "both-are-sent"
    first = group.call(SumWorker.double_after, table_of(4), str(both_are_sent))
    second = group.call(SumWorker.double, first.table.union(table_of(4)))
    both_are_sent.touch()

    batch = pulled(await second)

    assert batch.tensor("doubled").tolist() == [0, 2, 4, 6]


async def fetched_by(
    table: Table, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[DataProto, list[int]]:
    """Return these rows, and how many objects each call of Ray fetched for them."""
    fetched: list[int] = []
    fetch = ray.get

    def counting(refs: Any, **options: Any) -> Any:
        fetched.append(len(refs))
        return fetch(refs, **options)

    monkeypatch.setattr(table_module.ray, "get", counting)
    return table.rows(Share(rows)).pull(60).batch, fetched


async def test_a_receiver_fetches_only_the_blocks_of_its_rows(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    table = await group.call(SumWorker.widen, table_of(16))

    part, fetched = await fetched_by(table, (3, 10, 11), monkeypatch)

    assert part.tensor("wide")[:, 0].tolist() == [3, 10, 11]
    # Two results say where their rows lie; then three blocks of one row each.
    assert fetched == [2, 3]


async def test_small_rows_share_a_block(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    table = await group.call(SumWorker.double, table_of(64))

    part, fetched = await fetched_by(table, (3, 40, 41), monkeypatch)

    assert part.tensor("doubled").tolist() == [6, 80, 82]
    assert fetched == [2, 4], "two results, each with a block of each of two columns"


async def test_a_method_gets_only_the_columns_that_it_declares(group: Group) -> None:
    mask = Ragged.from_rows([[True] * 1000] * 4, torch.bool)
    wide = DataProto.from_dict({"numbers": torch.arange(4), "others": torch.zeros(4), Keys.RESPONSE_MASK: mask})
    table = Table.of_stored(store_rows(wide))

    everything = table.rows(Share((0, 1, 2, 3))).pull(60)
    declared = table.rows(Share((0, 1, 2, 3)), None, SumWorker.double_declared.reads).pull(60)
    doubled = await group.call(SumWorker.double_declared, table)

    assert (everything.num_bytes, declared.num_bytes) == (4 * 8 + 4 * 4 + 4000 + 4 * 8, 4 * 8 + 4000 + 4 * 8)
    assert pulled(doubled).tensor("doubled").tolist() == [0, 2, 4, 6]
    with pytest.raises(WorkerFailedError, match="column 'others' was not sent: add it to `reads` in the method"):
        await group.call(SumWorker.double_declared, table, "others")
    with pytest.raises(WorkerFailedError, match="column 'numbers' was not sent"):
        await group.without(["numbers"]).call(SumWorker.double_declared, table)


async def test_a_column_of_two_tables_is_refused_unless_one_replaces_it(group: Group) -> None:
    table = table_of(4)
    doubled = await group.call(SumWorker.double, table)

    with pytest.raises(ProtocolError, match=r"two tables have a column 'doubled': join them with replaced_by\(\)"):
        pulled(table.union(doubled, doubled))
    assert pulled(table.union(doubled).replaced_by(doubled)).tensor("doubled").tolist() == [0, 2, 4, 6]


async def test_an_error_of_the_workers_own_is_the_cause(group: Group) -> None:
    with pytest.raises(WorkerFailedError, match="sum rank 1 failed in fail_on: ZeroDivisionError") as raised:
        await group.call(SumWorker.fail_on, 1)

    assert isinstance(raised.value.__cause__, ZeroDivisionError)


async def test_a_failed_gpu_is_named_with_role_rank_and_address(group: Group) -> None:
    with pytest.raises(WorkerFailedError, match="sum rank 1 failed in lose_gpu_on: GPUFaultError") as raised:
        await group.call(SumWorker.lose_gpu_on, 1)

    assert isinstance(raised.value.__cause__, GPUFaultError)
    record = failure_record(raised.value)
    assert record.reason == Reason.GPU_FAULT
    assert record.message.startswith("sum rank 1: a GPU in the pod with address ")
    assert record.message.endswith("has failed: CUDA error: uncorrectable ECC error encountered")
    assert record.address == ray.util.get_node_ip_address()


def test_waiting_has_a_limit_and_says_for_whom(group: Group, tmp_path: Path) -> None:
    may_answer = tmp_path / "may-answer"
    future = group.call(SumWorker.double_after, table_of(2), str(may_answer))

    words = r"sum\.double_after did not answer within 0\.01 s; waiting for rank 0, 1"
    with pytest.raises(CallTimeoutError, match=words):
        future.result(0.01)
    may_answer.touch()
    assert len(future.result(300)) == 2


async def test_what_a_process_writes_is_in_its_log(group: Group, logs: Path) -> None:
    threads = await group.call(SumWorker.say, "hello from a worker")

    assert all(int(count) >= 1 for count in threads)
    # Each process copies its output to its log in a thread of its own, after it has answered.
    written = [logs / "sum-0.log", logs / "sum-1.log"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all("hello from a worker" in log.read_text() for log in written):
        await asyncio.sleep(0.1)
    assert ["hello from a worker" in log.read_text() for log in written] == [True, True]


async def test_a_process_that_exits_is_named_with_role_and_rank(pools: dict[str, PlacedPool], logs: Path) -> None:
    pool = pools["critic"]
    doomed = Launcher(logs, 300.0).start("doomed", SumWorker, pool, pool.bundles, environment=IMPORTABLE)
    await wait_until_up([doomed])

    with pytest.raises(WorkerLostError, match="doomed rank 0 was lost during die_on"):
        await doomed.call(SumWorker.die_on, 0)


async def test_a_worker_that_cannot_be_built_is_an_error_and_not_a_wait(
    pools: dict[str, PlacedPool], logs: Path
) -> None:
    pool = pools["critic"]
    launcher = Launcher(logs, 300.0)
    broken = launcher.start("broken", partial(SumWorker, unknown=1), pool, pool.bundles, environment=IMPORTABLE)

    with pytest.raises(WorkerFailedError, match=r"broken rank 0 could not start: .*unexpected keyword argument"):
        await wait_until_up([broken])


async def test_a_pool_that_does_not_fit_is_named_with_the_missing_resources(pools: dict[str, PlacedPool]) -> None:
    with pytest.raises(
        PoolNotPlacedError, match=r"pool actor requests 3 bundles .* the cluster has 2 pool_actor, and 3 are needed"
    ):
        await place(spec_of(gpus_of_actor=3), 1.0)
