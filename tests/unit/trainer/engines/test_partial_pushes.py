"""Pushes without the tensors that training never changes, over real process groups (each end in a separate thread)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.weights.boxes import Box
from ppojob_trainer.engines.weights.buckets import TensorSpec
from ppojob_trainer.engines.weights.plans import LinkPlan
from ppojob_trainer.engines.weights.receipts import Receipt, verify
from ppojob_trainer.engines.weights.receiver import WeightReceiver, WeightStream
from ppojob_trainer.engines.weights.sender import WeightSender
from tests.unit.trainer.engines.fsdp_engines import policy_engine

CPU, HOST, LIMIT = torch.device("cpu"), "127.0.0.1", 240
SHAPES = {"embedding": (50, 4), "query": (8, 4), "experts": (90, 4), "key": (6, 4)}
CHANGING = ("query", "key")
HALVES: dict[str, tuple[Box, ...]] = {name: (((0, rows // 2), (0, 4)),) for name, (rows, _) in SHAPES.items()}


class Source:
    """Weights of which some change: other ones at each draw."""

    def __init__(self, frozen: tuple[str, ...] = ("embedding", "experts")) -> None:
        self.frozen, self.generator = frozen, torch.Generator().manual_seed(1)
        self.tensors = {name: torch.randn(shape, generator=self.generator) for name, shape in SHAPES.items()}

    def train(self) -> None:
        for name in CHANGING:
            self.tensors[name] = torch.randn(SHAPES[name], generator=self.generator)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, shape, "float32", is_frozen=name in self.frozen) for name, shape in SHAPES.items()]

    def gather(self) -> Iterator[Tensor]:
        yield from self.tensors.values()

    def gather_changing(self) -> Iterator[Tensor]:
        yield from (tensor for name, tensor in self.tensors.items() if name not in self.frozen)


class Engine:
    """A sender, and a receiver with the weights that it has loaded."""

    def __init__(self, pool: ThreadPoolExecutor, source: Source, part: int | None = None) -> None:
        self.pool, self.source, self.version = pool, source, 0
        self.sender = WeightSender(source, [LinkPlan(0, "gloo", (0,), part)], HOST, LIMIT, CPU, bucket_bytes=1024)
        (link,) = self.sender.listen()
        prepared = pool.submit(self.sender.prepare)
        self.receiver = WeightReceiver(link, 1, CPU)
        prepared.result(LIMIT)
        self.held: dict[str, Tensor] = {}
        self.streams: list[WeightStream] = []

    def push(self, *, is_partial: bool, keeps_weights: bool = True, is_read: bool = True) -> Receipt:
        """Train, and push the result; return the receipt, which is the same at both ends."""
        self.version += 1
        self.source.train()
        pushing = self.pool.submit(self.sender.push, self.version, is_partial=is_partial)
        try:
            stream = self.receiver.begin(self.version, keeps_weights=keeps_weights)
            self.streams.append(stream)
            if not is_read:
                stream.drain()
            self.held |= {name: tensor.clone() for name, tensor in (stream if is_read else ())}
            received = stream.receipt()
        finally:
            [sent] = pushing.result(LIMIT)
        verify(sent, [received])
        return received


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def test_after_a_complete_push_only_what_changes_is_sent(pool: ThreadPoolExecutor) -> None:
    engine = Engine(pool, Source())
    assert engine.push(is_partial=False).num_bytes == 4 * 4 * (50 + 8 + 90 + 6)
    for _ in range(2):
        receipt = engine.push(is_partial=True)
        assert (receipt.num_tensors, receipt.num_bytes) == (2, 4 * 4 * (8 + 6))
        torch.testing.assert_close(engine.held, engine.source.tensors, atol=0, rtol=0)
    assert engine.push(is_partial=False).num_tensors == 4


def test_without_frozen_tensors_every_push_has_all(pool: ThreadPoolExecutor) -> None:
    engine = Engine(pool, Source(frozen=()))
    assert [engine.push(is_partial=number > 0).num_tensors for number in range(2)] == [4, 4]


def test_the_first_push_of_each_kind_and_each_tenth_are_compared(pool: ThreadPoolExecutor) -> None:
    engine = Engine(pool, Source())
    for number in range(12):
        engine.push(is_partial=number > 1)
    assert [number for number, stream in enumerate(engine.streams) if stream.is_compared] == [0, 2, 10]


def test_a_complete_push_after_a_partial_one_is_compared(pool: ThreadPoolExecutor) -> None:
    engine = Engine(pool, Source())
    for is_partial in (False, True, True, False, False, True):
        engine.push(is_partial=is_partial)
    assert [stream.is_compared for stream in engine.streams] == [True, True, False, True, False, False]


def test_a_partial_push_over_a_divided_link_has_the_boxes_of_what_changes(pool: ThreadPoolExecutor) -> None:
    engine = Engine(pool, Source(), part=0)
    engine.push(is_partial=False)
    engine.receiver.ask_for(HALVES)
    assert engine.push(is_partial=True).num_bytes == 4 * 4 * (4 + 3)
    engine.receiver.ask_for({name: HALVES[name] for name in CHANGING})
    assert [stream.is_compared for stream in engine.streams] == [True, True]
    for name in CHANGING:
        half = SHAPES[name][0] // 2
        torch.testing.assert_close(engine.held[name][:half], engine.source.tensors[name][:half], atol=0, rtol=0)
        assert engine.held[name][half:].isnan().all()


@pytest.mark.parametrize("part", [None, 0])
def test_a_loader_that_skips_a_tensor_of_a_partial_push_is_reported(pool: ThreadPoolExecutor, part: int | None) -> None:
    engine = Engine(pool, Source(), part)
    engine.push(is_partial=False)
    engine.receiver.ask_for(HALVES)
    engine.push(is_partial=True)
    with pytest.raises(WeightSyncError, match=r"other parts of the weights than before: \(\) of key"):
        engine.receiver.ask_for({"query": HALVES["query"], "key": ()})


def refused(engine: Engine, *, keeps_weights: bool = True) -> None:
    with pytest.raises(WeightSyncError, match="has only the tensors that training changes"):
        engine.push(is_partial=True, keeps_weights=keeps_weights)


def test_an_engine_that_released_its_weights_refuses_a_partial_push(pool: ThreadPoolExecutor) -> None:
    engine = Engine(pool, Source())
    engine.push(is_partial=False)
    refused(engine, keeps_weights=False)
    engine.push(is_partial=False, keeps_weights=False)
    engine.push(is_partial=True)


@pytest.mark.parametrize("is_partial", [False, True])
def test_after_a_push_that_failed_a_partial_one_is_refused_until_a_complete_one(
    pool: ThreadPoolExecutor, is_partial: bool
) -> None:
    engine = Engine(pool, Source())
    engine.push(is_partial=False)
    with pytest.raises(WeightSyncError, match="buckets of version 2 were loaded"):
        engine.push(is_partial=is_partial, is_read=False)
    for _ in range(2):
        refused(engine)
    engine.push(is_partial=False)
    engine.push(is_partial=True)
    torch.testing.assert_close(engine.held, engine.source.tensors, atol=0, rtol=0)


def test_the_first_push_over_a_link_is_complete(pool: ThreadPoolExecutor) -> None:
    engine = Engine(pool, Source())
    with pytest.raises(AssertionError, match="the first push over a link has all tensors"):
        engine.sender.push(1, is_partial=True)


@pytest.mark.parametrize(
    ("targets", "changing"),
    [
        # vLLM fuses some of a module's layers, so all of them come.
        (["q_proj"], "self_attn"),
        (["down_proj"], "mlp"),
        ([], "self_attn mlp"),
    ],
)
def test_what_changes_are_the_modules_with_adapters(
    parallel: ParallelMesh, model_path: Path, targets: list[str], changing: str
) -> None:
    model = ActorModel(path=str(model_path), lora=LoRA(rank=2, target_modules=targets))
    engine = policy_engine(parallel, model, ActorSpec(), AlgorithmSpec(), total_steps=1, dtype=torch.float32)
    source = engine.weights()
    specs = source.specs()
    sent = [spec.name for spec in specs if not spec.is_frozen]
    assert sent == [spec.name for spec in specs if spec.name.split(".")[-3] in changing.split()]
    assert len(sent) < len(specs)
    whole = {spec.name: tensor.clone() for spec, tensor in zip(specs, source.gather(), strict=True)}
    for name, tensor in zip(sent, source.gather_changing(), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(tensor, whole[name], atol=0, rtol=0)


def test_of_a_model_that_is_trained_as_a_whole_nothing_is_frozen(parallel: ParallelMesh, model_path: Path) -> None:
    model = ActorModel(path=str(model_path))
    engine = policy_engine(parallel, model, ActorSpec(), AlgorithmSpec(), total_steps=1, dtype=torch.float32)
    assert not any(spec.is_frozen for spec in engine.weights().specs())
