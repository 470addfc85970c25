"""Weights on their way from a sender to receivers, over real process groups (each end in a separate thread)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.errors import RendezvousError, WeightLinkError, WeightSyncError
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.weights import sender as sender_module
from ppojob_trainer.engines.weights.buckets import (
    TensorSpec,
    buckets_from_text,
    buckets_to_text,
    checksum,
    make_buckets,
)
from ppojob_trainer.engines.weights.plans import LinkPlan, Receivers, link_plans
from ppojob_trainer.engines.weights.receipts import Receipt, verify
from ppojob_trainer.engines.weights.receiver import WeightReceiver
from ppojob_trainer.engines.weights.sender import WeightSender
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.engines.test_divided_transfer import shorten

CPU = torch.device("cpu")
HOST, LIMIT = "127.0.0.1", 240


class Tensors:
    """A source without a model: names, and tensors that the test may change."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            "a": torch.randn(7, 5, generator=generator),
            "large": torch.randn(600, generator=generator).bfloat16(),
            "b": torch.randn(3, generator=generator),
        }

    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors.items()
        ]

    def gather(self) -> Iterator[torch.Tensor]:
        yield from self.tensors.values()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def connected(
    source: Tensors, pool: ThreadPoolExecutor, num_receivers: int, bucket_bytes: int = 512, limit: float = LIMIT
) -> tuple[WeightSender, list[WeightReceiver]]:
    plan = LinkPlan(0, "gloo", tuple(range(num_receivers)))
    sender = WeightSender(source, [plan], HOST, limit, CPU, bucket_bytes)
    (link,) = sender.listen()
    assert type(link)(**link.to_wire()) == link
    prepared = pool.submit(sender.prepare)
    receivers = [pool.submit(WeightReceiver, link, rank, CPU) for rank in range(1, num_receivers + 1)]
    # Also if the sender fails: a receiver that is late would find other variables of the environment.
    wait(receivers, LIMIT)
    assert prepared.result(LIMIT) == {"GLOO/TCP": num_receivers}
    return sender, [receiver.result(LIMIT) for receiver in receivers]


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def receive(receiver: WeightReceiver, version: int) -> tuple[dict[str, torch.Tensor], Receipt]:
    stream = receiver.begin(version)
    tensors = {name: tensor.clone() for name, tensor in stream}
    return tensors, stream.receipt()


def test_all_receivers_get_equal_tensors_push_after_push(pool: ThreadPoolExecutor) -> None:
    source = Tensors()
    sender, receivers = connected(source, pool, num_receivers=2)
    for version in (1, 2):
        source.tensors["b"] += version
        waiting = [pool.submit(receive, receiver, version) for receiver in receivers]
        [sent] = sender.push(version)
        found = [future.result(LIMIT) for future in waiting]
        verify(sent, [receipt for _, receipt in found])
        for tensors, _ in found:
            torch.testing.assert_close(tensors, source.tensors, atol=0, rtol=0)
    assert sent.num_tensors == 3
    assert sent.num_bytes == 7 * 5 * 4 + 600 * 2 + 3 * 4
    for end in (sender, *receivers):
        end.close()


def test_another_version_than_wanted_is_refused(pool: ThreadPoolExecutor) -> None:
    sender, (receiver,) = connected(Tensors(), pool, num_receivers=1)
    pushed = pool.submit(sender.push, 3)
    with pytest.raises(WeightSyncError, match="sends version 3 of the weights, wanted was 4"):
        receiver.begin(4)
    [sent] = pushed.result(LIMIT)
    assert sent.version == 3, "the sender does not wait for it"


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_a_receiver_that_fails_takes_the_rest_so_that_the_others_get_theirs(
    pool: ThreadPoolExecutor, num_read: int
) -> None:
    sender, (failing, other) = connected(Tensors(), pool, num_receivers=2)
    for version in (1, 2):
        pushed, received = pool.submit(sender.push, version), pool.submit(receive, other, version)
        stream = failing.begin(version)
        list(itertools.islice(stream, num_read))
        stream.drain()

        verify(pushed.result(LIMIT)[0], [received.result(LIMIT)[1]])


def test_a_receiver_without_memory_for_a_bucket_takes_it_when_it_drops_the_rest(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, (failing, other) = connected(Tensors(), pool, num_receivers=2)
    pushed, received = pool.submit(sender.push, 1), pool.submit(receive, other, 1)
    rest = iter(stream := failing.begin(1))
    next(rest)
    with monkeypatch.context() as patched:
        patched.setattr(failing._channel, "receive", raising(torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            next(rest)
    stream.drain()

    verify(pushed.result(LIMIT)[0], [received.result(LIMIT)[1]])


def test_a_receiver_without_memory_for_the_rest_fails_the_push_at_once(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, (receiver,) = connected(Tensors(), pool, num_receivers=1)
    pushed = pool.submit(sender.push, 1)
    next(iter(stream := receiver.begin(1)))
    monkeypatch.setattr(receiver._channel, "receive", raising(torch.OutOfMemoryError("CUDA out of memory")))
    stream.drain()

    with pytest.raises(WeightLinkError, match="stopped receiving version 1"):
        pushed.result(LIMIT / 2)


def test_an_actor_without_memory_for_a_bucket_blames_no_receiver(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, (receiver,) = connected(Tensors(), pool, num_receivers=1)
    monkeypatch.setattr(sender_module, "checksum", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        sender.push(1)
    for end in (sender, receiver):
        end.close()


def test_after_a_failed_connection_nothing_is_left_to_take(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, (receiver,) = connected(Tensors(), pool, num_receivers=1)
    pushed, calls = pool.submit(sender.push, 1), []

    def broken(num_bytes: int) -> torch.Tensor:
        calls.append(num_bytes)
        raise RuntimeError("Connection closed by peer")

    stream = receiver.begin(1)
    monkeypatch.setattr(receiver._channel, "receive", broken)
    with pytest.raises(RuntimeError, match="closed by peer"):
        next(iter(stream))
    stream.drain()

    assert len(calls) == 1, "it would wait once more"
    receiver.close()
    with pytest.raises(WeightLinkError, match="stopped receiving version 1"):
        pushed.result(LIMIT)


def test_a_reader_that_stops_early_has_no_receipt(pool: ThreadPoolExecutor) -> None:
    source = Tensors()
    sender, (receiver,) = connected(source, pool, num_receivers=1)
    pushed = pool.submit(sender.push, 1)
    stream = receiver.begin(1)
    rest = iter(stream)
    next(rest)
    with pytest.raises(WeightSyncError, match="only 1 of 3 buckets of version 1"):
        stream.receipt()
    list(rest)
    assert pushed.result(LIMIT) == [stream.receipt()]


def test_gloo_listens_on_the_interface_that_it_is_given(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sender, (receiver,) = connected(Tensors(), pool, num_receivers=1)
    for end in (sender, receiver):
        end.close()

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    with pytest.raises(RendezvousError, match="none9"):
        connected(Tensors(), pool, num_receivers=1)


def test_a_replica_that_does_not_come_is_named() -> None:
    sender = WeightSender(Tensors(), [LinkPlan(0, "gloo", (0, 1))], HOST, LIMIT, CPU)
    sender.listen()
    shorten(sender, 1)
    with pytest.raises(RendezvousError, match=r"workers \[0, 1\] did not all connect for weights .* within 1 s"):
        sender.prepare()


def test_a_rank_gathers_to_the_end_although_a_receiver_is_lost(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Tensors()
    sender, [receiver] = connected(source, pool, num_receivers=1)
    [link_end] = sender._link_ends
    gathered: list[str] = []

    def gather() -> Iterator[torch.Tensor]:
        for name, tensor in source.tensors.items():
            gathered.append(name)
            yield tensor

    def lost(tensor: torch.Tensor) -> None:
        raise WeightLinkError("a rollout replica stopped receiving")

    monkeypatch.setattr(source, "gather", gather)
    monkeypatch.setattr(link_end, "send", lost)
    with pytest.raises(WeightLinkError, match="stopped receiving"):
        sender.push(1)

    assert gathered == ["a", "large", "b"], "the other ranks would wait for this one"
    receiver.close()


def test_the_other_receivers_do_not_wait_for_the_limit_when_one_is_lost(pool: ThreadPoolExecutor) -> None:
    sender, (failing, other) = connected(Tensors(), pool, num_receivers=2)
    pushed, received = pool.submit(sender.push, 1), pool.submit(receive, other, 1)
    stream = iter(failing.begin(1))
    next(stream)
    # As the end of its process does.
    failing._channel.close()

    with pytest.raises(WeightLinkError, match="stopped receiving version 1"):
        pushed.result(LIMIT / 2)
    assert received.exception(LIMIT / 2) is not None
    other.close()


def test_a_rank_without_a_plan_only_gathers() -> None:
    sender = WeightSender(Tensors(), [], HOST, 1, CPU)
    assert sender.listen() == []
    assert sender.prepare() == {}
    assert sender.push(1) == []


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (Receipt(1, 2, 10, (5, 6)), "version 1 with 2 tensors, sent was version 2"),
        (Receipt(2, 2, 10, (5, 7)), "replica 1 has other weights .* differs in bucket 1 of 2"),
    ],
)
def test_receipts_that_differ_are_refused(received: Receipt, message: str) -> None:
    sent = Receipt(2, 2, 10, (5, 6))
    verify(sent, [replace(sent)])
    with pytest.raises(WeightSyncError, match=message):
        verify(sent, [sent, received])


def test_a_tensor_larger_than_a_bucket_gets_its_own() -> None:
    specs = [TensorSpec("a", (4,), "float32"), TensorSpec("big", (300,), "float32"), TensorSpec("b", (3,), "bfloat16")]
    buckets = make_buckets(specs, 512)
    assert [[spec.name for spec in bucket.specs] for bucket in buckets] == [["a"], ["big"], ["b"]]
    assert [bucket.num_bytes for bucket in buckets] == [512, 1536, 512]
    (together,) = make_buckets(specs, 4096)
    assert together.offsets == (0, 16, 1216)
    assert buckets_from_text(buckets_to_text(buckets).encode()) == buckets


def test_a_checksum_sees_changed_bytes_and_exchanged_rows() -> None:
    buffer = torch.arange(1024, dtype=torch.int64).to(torch.uint8)
    changed, exchanged = buffer.clone(), torch.cat([buffer[512:] + 1, buffer[:512]])
    changed[77] += 1
    straight = torch.cat([buffer[:512], buffer[512:] + 1])
    assert len({int(checksum(one)) for one in (buffer, changed, straight, exchanged)}) == 4


def test_the_weights_of_a_sharded_model_arrive(
    parallel: ParallelMesh, model_path: Path, pool: ThreadPoolExecutor
) -> None:
    engine = policy_engine(
        parallel, ActorModel(path=str(model_path)), ActorSpec(), AlgorithmSpec(), total_steps=1, dtype=torch.float32
    )
    source = engine.weights()
    sender = WeightSender(source, [LinkPlan(0, "gloo", (0,))], HOST, LIMIT, CPU)
    (link,) = sender.listen()
    prepared = pool.submit(sender.prepare)
    receiver = WeightReceiver(link, 1, CPU)
    prepared.result(LIMIT)
    pushed = pool.submit(sender.push, 1)
    tensors, receipt = receive(receiver, 1)
    assert pushed.result(LIMIT) == [receipt]
    expected = {name: parameter.full_tensor() for name, parameter in engine.module.language_model.named_parameters()}
    assert "lm_head.weight" not in tensors
    torch.testing.assert_close(tensors, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("device", "is_shared", "expected"),
    [
        (Device.CPU, True, [LinkPlan(0, "gloo", (0, 1))]),
        (Device.CUDA, False, [LinkPlan(0, "nccl", (0, 1))]),
        (Device.CUDA, True, [LinkPlan(0, "cuda_ipc", (0,)), LinkPlan(1, "cuda_ipc", (1,))]),
    ],
)
def test_who_sends_to_whom(device: Device, is_shared: bool, expected: list[LinkPlan]) -> None:
    assert link_plans(device, 2, [Receivers(2, is_shared)]) == expected


def test_more_workers_than_shared_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rollout workers cannot share the GPUs of 2 actor ranks"):
        link_plans(Device.CUDA, 2, [Receivers(3, True)])


@pytest.mark.parametrize(
    ("device", "receivers", "expected"),
    [
        (
            Device.CUDA,
            [Receivers(2, True), Receivers(1, False)],
            [LinkPlan(0, "cuda_ipc", (0,)), LinkPlan(1, "cuda_ipc", (1,)), LinkPlan(0, "nccl", (2,))],
        ),
        (
            Device.CUDA,
            [Receivers(1, False), Receivers(2, True), Receivers(1, False)],
            [LinkPlan(0, "cuda_ipc", (1,)), LinkPlan(1, "cuda_ipc", (2,)), LinkPlan(0, "nccl", (0, 3))],
        ),
        (Device.CPU, [Receivers(1, True), Receivers(1, False)], [LinkPlan(0, "gloo", (0, 1))]),
        (
            Device.CUDA,
            [Receivers(2, True, num_parts=2), Receivers(6, False, frozenset({4, 5}), num_parts=2)],
            [
                LinkPlan(0, "cuda_ipc", (0,)),
                LinkPlan(1, "cuda_ipc", (1,)),
                LinkPlan(0, "nccl", (2, 4), part=0),
                LinkPlan(1, "nccl", (3, 5), part=1),
            ],
        ),
        (
            Device.CUDA,
            [Receivers(3, False, num_parts=3)],
            [
                LinkPlan(0, "nccl", (0,), part=0),
                LinkPlan(1, "nccl", (1,), part=1),
                LinkPlan(0, "nccl", (2,), part=2),
            ],
        ),
    ],
)
def test_engines_in_several_pools_are_reached_each_in_its_way(
    device: Device, receivers: list[Receivers], expected: list[LinkPlan]
) -> None:
    assert link_plans(device, 2, receivers) == expected


def test_a_rank_sends_the_same_weights_over_each_of_its_links(pool: ThreadPoolExecutor) -> None:
    source = Tensors()
    sender = WeightSender(source, [LinkPlan(0, "gloo", (0,)), LinkPlan(0, "gloo", (1, 2))], HOST, LIMIT, CPU, 512)
    links = sender.listen()
    prepared = pool.submit(sender.prepare)
    numbered = [(links[0], 1), (links[1], 1), (links[1], 2)]
    receivers = [pool.submit(WeightReceiver, link, rank, CPU) for link, rank in numbered]
    assert prepared.result(LIMIT) == {"GLOO/TCP": 3}
    waiting = [pool.submit(receive, receiver.result(LIMIT), 1) for receiver in receivers]
    first, second = sender.push(1)
    for sent, future in zip((first, second, second), waiting, strict=True):
        tensors, receipt = future.result(LIMIT)
        assert receipt == sent
        torch.testing.assert_close(tensors, source.tensors, atol=0, rtol=0)
