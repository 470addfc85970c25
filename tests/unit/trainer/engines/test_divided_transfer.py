"""Weights of which each receiver gets its boxes only, over real process groups (each end in a separate thread)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.errors import WeightLinkError, WeightSyncError
from ppojob_trainer.engines.rollout.loader_reads import LoaderReads
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.weights.boxes import Box, inside
from ppojob_trainer.engines.weights.buckets import Bucket, TensorSpec, make_buckets
from ppojob_trainer.engines.weights.plans import LinkPlan
from ppojob_trainer.engines.weights.receipts import Receipt, verify
from ppojob_trainer.engines.weights.receiver import WeightReceiver
from ppojob_trainer.engines.weights.sender import WeightSender
from tests.unit.trainer.engines.fsdp_engines import policy_engine

CPU, HOST, LIMIT = torch.device("cpu"), "127.0.0.1", 240
SHAPES = {"rows": (8, 6), "columns": (6, 8), "experts": (3, 8, 4), "bias": (8,), "norm": (5,), "unread": (7, 7)}
Boxes = dict[str, tuple[Box, ...]]


def boxes_of(rank: int) -> Boxes:
    """Return what the first or the second of two ranks needs; of the experts, the first and the third quarter, say."""
    start, quarter = 4 * rank, 2 * rank
    half = (start, start + 4)
    return {
        "rows": ((half, (0, 6)),),
        "columns": (((0, 6), half),),
        "experts": tuple(((0, 3), (begin, begin + 2), (0, 4)) for begin in (quarter, 4 + quarter)),
        "bias": ((half,),),
        "norm": (((0, 5),),),
        "unread": (),
    }


class Source:
    """Weights of the shapes above, other ones for each push."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.draw()

    def draw(self) -> None:
        self.tensors = {name: torch.randn(shape, generator=self.generator) for name, shape in SHAPES.items()}

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]

    def gather(self) -> Iterator[Tensor]:
        yield from self.tensors.values()


class Transfer:
    """A sender with a link for each of two tensor-parallel ranks, and one or two receivers of each."""

    def __init__(self, pool: ThreadPoolExecutor, replicas: int) -> None:
        self.pool, self.source, self.version = pool, Source(), 0
        plans = [LinkPlan(0, "gloo", tuple(range(part, 2 * replicas, 2)), part) for part in range(2)]
        self.sender = WeightSender(self.source, plans, HOST, LIMIT, CPU, bucket_bytes=1024)
        links = self.sender.listen()
        prepared = pool.submit(self.sender.prepare)
        joining = [pool.submit(WeightReceiver, links[part], 1 + n, CPU) for n in range(replicas) for part in range(2)]
        prepared.result(LIMIT)
        self.receivers = [receiver.result(LIMIT) for receiver in joining]

    def push(self, boxes: list[Boxes] | None = None) -> tuple[list[Receipt], list[tuple[dict[str, Tensor], Receipt]]]:
        """Push new weights; return the receipts, and what each receiver has got. `boxes`: what they ask for then."""
        self.version += 1
        self.source.draw()
        waiting = [self.pool.submit(self.receive, receiver) for receiver in self.receivers]
        try:
            sent = self.sender.push(self.version)
        finally:
            wait(waiting, LIMIT)
        found = [future.result(0) for future in waiting]
        for receiver, asked in zip(self.receivers, boxes or [], strict=False):
            receiver.ask_for(asked)
        return sent, found

    def receive(self, receiver: WeightReceiver) -> tuple[dict[str, Tensor], Receipt]:
        stream = receiver.begin(self.version)
        tensors = {name: tensor.clone() for name, tensor in stream}
        return tensors, replace(stream.receipt(), is_read_back=stream.is_compared)

    def close(self) -> None:
        for end in (self.sender, *self.receivers):
            end.close()


def shorten(sender: WeightSender, limit: float) -> None:
    """Set the limit of the waits from now on: on a busy machine, the connection itself may take longer."""
    for link_end in sender._link_ends:
        assert link_end._store is not None
        link_end._timeout_seconds = limit
        link_end._store.set_timeout(timedelta(seconds=limit))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(6) as executor:
        yield executor


@pytest.fixture(params=[1, 2], ids=["one-replica", "two-replicas"])
def transfer(request: pytest.FixtureRequest, pool: ThreadPoolExecutor) -> Iterator[Transfer]:
    found = Transfer(pool, request.param)
    yield found
    found.close()


def both(transfer: Transfer) -> list[Boxes]:
    return [boxes_of(number % 2) for number in range(len(transfer.receivers))]


def test_the_first_push_has_whole_tensors_and_later_ones_the_boxes(transfer: Transfer) -> None:
    whole, first = transfer.push(both(transfer))
    for tensors, _ in first:
        torch.testing.assert_close(tensors, transfer.source.tensors, atol=0, rtol=0)
    sent, found = transfer.push(both(transfer))
    for number, (tensors, receipt) in enumerate(found):
        verify(sent[number % 2], [receipt])
        for name, boxes in boxes_of(number % 2).items():
            expected = torch.full(SHAPES[name], torch.nan)
            for box in boxes:
                inside(expected, box).copy_(inside(transfer.source.tensors[name], box))
            torch.testing.assert_close(tensors[name], expected, atol=0, rtol=0, equal_nan=True)
    assert [receipt.num_bytes for receipt in whole] == [4 * (48 + 48 + 96 + 8 + 5 + 49)] * 2
    assert [receipt.num_bytes for receipt in sent] == [4 * (24 + 24 + 48 + 4 + 5)] * 2


def test_a_tensor_of_which_nothing_is_sent_takes_no_memory_and_a_read_of_it_is_seen() -> None:
    (bucket,) = make_buckets([TensorSpec("unread", (64, 32), "float32", ())])
    assert bucket.num_sums == (0,), "a push that is compared has no sums of it"
    reads = LoaderReads()
    ((name, tensor),) = reads.passing(bucket.tensors(torch.zeros(bucket.num_bytes, dtype=torch.uint8)))
    assert (name, tensor.shape, tensor.untyped_storage().nbytes()) == ("unread", (64, 32), 4)
    assert tensor.isnan().all()
    assert reads.boxes() == {"unread": ()}

    with reads:
        torch.empty(8, 32).copy_(tensor[:8])

    assert reads.boxes() == {"unread": (((0, 64), (0, 32)),)}


def test_the_first_push_the_first_with_boxes_and_each_tenth_are_compared(pool: ThreadPoolExecutor) -> None:
    transfer = Transfer(pool, 1)
    compared = [transfer.push(both(transfer) if number == 0 else None)[1][0][1].is_read_back for number in range(21)]
    assert [number for number, is_compared in enumerate(compared) if is_compared] == [0, 1, 10, 20]
    transfer.close()


def test_boxes_of_the_other_rank_are_reported(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer.push(both(transfer))
    pack = Bucket.pack

    def swapped(bucket: Bucket, buffer: Tensor, index: int, tensor: Tensor) -> None:
        other = boxes_of(0 if bucket.specs[0].boxes == boxes_of(1)["rows"] else 1)
        specs = tuple(replace(spec, boxes=other[spec.name]) for spec in bucket.specs)
        pack(replace(bucket, specs=specs), buffer, index, tensor)

    monkeypatch.setattr(Bucket, "pack", swapped)
    # Of the norm, both have all; of `unread`, none.
    with pytest.raises(WeightSyncError, match=r"5 of 6 parts of version 2 are not .*, such as .* of rows"):
        transfer.push()


@pytest.mark.parametrize("name", ["rows", "columns", "experts", "bias", "norm"])
def test_one_stale_tensor_is_reported(transfer: Transfer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    transfer.push(both(transfer))
    stale, pack = transfer.source.tensors[name], Bucket.pack

    def packed(bucket: Bucket, buffer: Tensor, index: int, tensor: Tensor) -> None:
        pack(bucket, buffer, index, stale if bucket.specs[index].name == name else tensor)

    monkeypatch.setattr(Bucket, "pack", packed)
    with pytest.raises(WeightSyncError, match=rf"such as .* of {name}"):
        transfer.push()


def test_receivers_of_a_link_that_need_different_boxes_get_whole_tensors(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = Transfer(pool, 2)
    asked: list[Any] = [boxes_of(0), boxes_of(1), boxes_of(1), boxes_of(1)]
    transfer.push(asked)
    sent, found = transfer.push()
    assert [receipt.num_bytes for receipt in sent] == [4 * 254, 4 * 105]
    torch.testing.assert_close(found[0][0], transfer.source.tensors, atol=0, rtol=0)
    assert "rollout workers (0, 2) need different parts" in caplog.text
    transfer.close()


def test_boxes_that_do_not_suffice_any_more_are_reported(pool: ThreadPoolExecutor) -> None:
    transfer = Transfer(pool, 1)
    transfer.push(both(transfer))
    more = {**boxes_of(0), "rows": (((0, 8), (0, 6)),)}
    # Whole tensors were sent, so there is no harm.
    transfer.receivers[0].ask_for(more)
    with pytest.raises(WeightSyncError, match=r"reads other parts .* \(\(\(0, 8\), \(0, 6\)\),\) of rows"):
        transfer.push([more])
    transfer.close()


def test_a_receiver_that_does_not_ask_is_named(pool: ThreadPoolExecutor) -> None:
    transfer = Transfer(pool, 1)
    transfer.push([boxes_of(0)])
    shorten(transfer.sender, 2)
    with pytest.raises(WeightLinkError, match=r"not all rollout workers \[1\] asked for their part .* within 2 s"):
        transfer.sender.push(2)
    transfer.close()


def test_boxes_of_a_model_with_adapters_are_those_of_the_merged_weights(
    parallel: ParallelMesh, model_path: Path, pool: ThreadPoolExecutor
) -> None:
    model = ActorModel(path=str(model_path), lora=LoRA(rank=2))
    engine = policy_engine(parallel, model, ActorSpec(), AlgorithmSpec(), total_steps=1, dtype=torch.float32)
    for name, parameter in engine.module.language_model.named_parameters():
        if name.endswith("lora_B"):
            # It begins at 0, where a merge would not be seen.
            torch.nn.init.normal_(parameter.detach().to_local())
    source = engine.weights()
    sender = WeightSender(source, [LinkPlan(0, "gloo", (0,), part=0)], HOST, LIMIT, CPU)
    (link,) = sender.listen()
    prepared = pool.submit(sender.prepare)
    receiver = WeightReceiver(link, 1, CPU)
    prepared.result(LIMIT)
    halves = {
        spec.name: (((0, spec.shape[0] // 2), *((0, length) for length in spec.shape[1:])),) for spec in source.specs()
    }
    for version in (1, 2):
        pushed = pool.submit(sender.push, version)
        stream = receiver.begin(version)
        found = {name: tensor.clone() for name, tensor in stream}
        assert pushed.result(LIMIT) == [stream.receipt()]
        receiver.ask_for(halves)
    for spec, whole in zip(source.specs(), source.gather(), strict=True):
        ((rows, *_),) = halves[spec.name]
        torch.testing.assert_close(found[spec.name][: rows[1]], whole[: rows[1]], atol=0, rtol=0)
        assert found[spec.name][rows[1] :].isnan().all()
    base = dict(engine.module.language_model.named_parameters())
    name = "layers.1.mlp.down_proj.weight"
    [(own, unmerged)] = [(own, local(each)) for own, each in base.items() if own.endswith(name)]
    half = len(unmerged) // 2
    assert not torch.equal(found[own][:half], unmerged[:half]), "adapters change it"
