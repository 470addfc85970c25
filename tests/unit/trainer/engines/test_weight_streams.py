"""A stream of weights whose reader stops: the rest of the push is taken, also where memory is short."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.announcements import Announcement
from ppojob_trainer.engines.weights.buckets import TensorSpec, make_buckets
from ppojob_trainer.engines.weights.receiver import WeightStream

SIZES = {"small": 1024, "another": 1024, "large": 4096, "last": 1024}
BUCKETS = make_buckets([TensorSpec(name, (size,), "float32") for name, size in SIZES.items()], 4096)


class SmallMemory:
    """Receives zeros into a memory of so many bytes, in which each buffer stays as long as anybody holds it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.taken: list[int] = []
        self.is_closed = False
        self._buffers: list[weakref.ref[torch.Tensor]] = []

    def receive(self, num_bytes: int) -> torch.Tensor:
        held = sum(buffer.numel() for reference in self._buffers if (buffer := reference()) is not None)
        if held + num_bytes > self.num_bytes:
            raise torch.OutOfMemoryError(f"{held} bytes are held, {num_bytes} are wanted")
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._buffers.append(weakref.ref(buffer))
        self.taken.append(num_bytes)
        return buffer

    def skip(self, num_bytes: int) -> None:
        self.receive(num_bytes)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        raise AssertionError("it only receives")

    def send(self, buffer: torch.Tensor) -> None:
        raise AssertionError("it only receives")

    def transports(self) -> Transports:
        return {}

    def close(self) -> None:
        raise AssertionError("the sender would wait")

    def break_off(self) -> None:
        self.is_closed = True


def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _, tensor in tensors:
        assert tensor.numel() > 0


def received(memory: SmallMemory) -> None:
    stream = WeightStream(Announcement(1, is_compared=False, is_divided=False), BUCKETS, memory)
    try:
        load(iter(stream))
    except BaseException as error:
        stream.drain(error)
        raise


def test_a_reader_without_memory_lets_go_of_what_it_holds_before_the_rest_is_taken() -> None:
    # The large bucket fits, but not beside the one before it.
    memory = SmallMemory(17 * 1024)

    with pytest.raises(torch.OutOfMemoryError, match="4096 bytes are held, 16384 are wanted"):
        received(memory)

    assert memory.taken == [4096, 4096, 16384, 4096]
    assert not memory.is_closed


def test_a_reader_that_has_no_memory_for_a_bucket_at_all_ends_the_channel() -> None:
    memory = SmallMemory(9 * 1024)

    with pytest.raises(torch.OutOfMemoryError):
        received(memory)

    assert memory.taken == [4096, 4096]
    assert memory.is_closed
