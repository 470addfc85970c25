"""What an update waits for while a checkpoint is saved in the background, and what the checkpoint then holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ppojob_api.v1alpha1.model import Offload
from ppojob_trainer.engines.errors import CheckpointUnwritableError
from ppojob_trainer.engines.train.fsdp.background_saves import BackgroundSaves
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.offload import Offloader
from ppojob_trainer.engines.train.fsdp.pinned import host_buffer
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.two_ranks import make_policy

LIMIT_S = 60.0
A_WHILE_S = 0.3
WAITED = "timing_s/checkpoint/wait_actor"
MOMENTS = Offload(optimizer=True)
SINGLE_NUMBER = 4


@dataclass
class Gates:
    """Hold up a save: before its tensors are copied, and before they are written.

    needs_copies, needs_all: an update has begun to wait until all is copied, or written.
    """

    may_copy: threading.Event = field(default_factory=threading.Event)
    may_write: threading.Event = field(default_factory=threading.Event)
    needs_copies: threading.Event = field(default_factory=threading.Event)
    needs_all: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    found, copying, write_data = Gates(), Offloader.copying, FileSystemWriter.write_data
    wait = BackgroundSaves._wait

    def late_copying(self: Offloader, state: dict[str, Any]) -> Any:
        copy = copying(self, state)

        def late() -> dict[str, Any]:
            assert found.may_copy.wait(LIMIT_S)
            return copy()

        return late

    def late_write(self: FileSystemWriter, *args: Any) -> Any:
        assert found.may_write.wait(LIMIT_S)
        return write_data(self, *args)

    def told_wait(self: BackgroundSaves, future: Future[Any]) -> None:
        assert self._running is not None
        (found.needs_copies if future is self._running.copied else found.needs_all).set()
        wait(self, future)

    monkeypatch.setattr(BackgroundSaves, "_wait", told_wait)
    monkeypatch.setattr(Offloader, "copying", late_copying)
    monkeypatch.setattr(FileSystemWriter, "write_data", late_write)
    yield found
    found.may_copy.set()
    found.may_write.set()


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name of the thread, without its number, and the bytes of each allocation on the host."""
    found: list[tuple[str, int]] = []

    def counted(num_bytes: int, *, pinned: bool) -> Tensor:
        found.append((threading.current_thread().name.rsplit("_", 1)[0], num_bytes))
        return host_buffer(num_bytes, pinned=pinned)

    monkeypatch.setattr("ppojob_trainer.engines.train.fsdp.offload.host_buffer", counted)
    return found


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as found:
        yield found


def trained(engine: FSDPEngine) -> list[Tensor]:
    return [tensor.clone() for tensor in engine.weights().gather()]


def is_waiting(future: Future[Any]) -> bool:
    try:
        future.result(A_WHILE_S)
    except TimeoutError:
        return True
    return False


def wait_until_saved(engine: FSDPEngine) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not engine.is_saved():
        assert time.monotonic() < deadline, "the save did not end"
        time.sleep(0.01)


def test_an_update_waits_for_the_copies_before_its_first_step_and_not_for_the_storage(
    parallel: ParallelMesh,
    model_path: Path,
    batch: DataProto,
    tmp_path: Path,
    gates: Gates,
    thread: ThreadPoolExecutor,
) -> None:
    engine, resumed = make_policy(parallel, model_path), make_policy(parallel, model_path)
    engine.update(batch)
    before = trained(engine)

    engine.save(tmp_path / "step", in_background=True)

    # What changes no parameter does not wait.
    engine.forward(batch)
    assert not gates.needs_copies.is_set()
    updating = thread.submit(engine.update, batch)
    assert gates.needs_copies.wait(LIMIT_S)
    assert is_waiting(updating)
    assert all(torch.equal(*both) for both in zip(trained(engine), before, strict=True))
    gates.may_copy.set()
    metrics = updating.result(LIMIT_S)
    assert not engine.is_saved(), "the storage has nothing yet"
    assert metrics.pop(WAITED) > 0
    assert not all(torch.equal(*both) for both in zip(trained(engine), before, strict=True))
    gates.may_write.set()
    wait_until_saved(engine)
    assert WAITED not in engine.update(batch)
    resumed.restore(tmp_path / "step")
    assert resumed.update(batch) == metrics


def test_with_offloaded_moments_an_update_waits_at_its_end_until_all_is_written(
    parallel: ParallelMesh,
    model_path: Path,
    batch: DataProto,
    tmp_path: Path,
    gates: Gates,
    thread: ThreadPoolExecutor,
) -> None:
    engine, resumed = (make_policy(parallel, model_path, offload=MOMENTS) for _ in range(2))
    engine.update(batch)
    gates.may_copy.set()

    engine.save(tmp_path / "step", in_background=True)

    updating = thread.submit(engine.update, batch)
    assert gates.needs_all.wait(LIMIT_S)
    assert is_waiting(updating)
    gates.may_write.set()
    metrics = updating.result(LIMIT_S)
    assert metrics.pop(WAITED) > 0
    wait_until_saved(engine)
    resumed.restore(tmp_path / "step")
    assert resumed.update(batch) == metrics


@pytest.mark.parametrize("offload", [Offload(), MOMENTS], ids=["nothing offloaded", "moments offloaded"])
def test_the_second_save_uses_the_memory_of_the_first(
    parallel: ParallelMesh,
    model_path: Path,
    batch: DataProto,
    tmp_path: Path,
    allocated: list[tuple[str, int]],
    offload: Offload,
) -> None:
    engine, resumed = make_policy(parallel, model_path, offload=offload), make_policy(parallel, model_path)
    engine.update(batch)
    num_taken: list[int] = []
    for number in range(3):
        engine.save(tmp_path / str(number), in_background=True)
        wait_until_saved(engine)
        num_taken.append(len(allocated))
        metrics = engine.update(batch)

    assert num_taken[0] == num_taken[1] == num_taken[2] > 0
    metrics.pop(WAITED)
    resumed.restore(tmp_path / "2")
    assert resumed.update(batch) == metrics


@pytest.mark.parametrize("offload", [Offload(), MOMENTS], ids=["nothing offloaded", "moments offloaded"])
def test_a_save_that_was_prepared_for_allocates_nothing(
    parallel: ParallelMesh,
    model_path: Path,
    batch: DataProto,
    tmp_path: Path,
    allocated: list[tuple[str, int]],
    offload: Offload,
) -> None:
    engine, resumed = make_policy(parallel, model_path, offload=offload), make_policy(parallel, model_path)
    engine.prepare_saves()
    engine.update(batch)
    engine.save(tmp_path / "0", in_background=True)
    wait_until_saved(engine)
    metrics = engine.update(batch)

    sizes: dict[str, set[int]] = {}
    for thread, num_bytes in allocated:
        sizes.setdefault(thread, set()).add(num_bytes)
    assert max(sizes["allocate copies"]) > SINGLE_NUMBER
    random_state = torch.get_rng_state().nbytes
    # AdamW counts its steps in one float32 for each parameter.
    assert sizes["copy checkpoint"] <= {SINGLE_NUMBER, random_state}
    metrics.pop(WAITED)
    resumed.restore(tmp_path / "0")
    assert resumed.update(batch) == metrics


def test_memory_that_cannot_be_prepared_fails_the_save(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(num_bytes: int, *, pinned: bool) -> Tensor:
        raise RuntimeError("the driver cannot pin so much")

    engine = make_policy(parallel, model_path)
    monkeypatch.setattr("ppojob_trainer.engines.train.fsdp.offload.host_buffer", refuse)
    engine.prepare_saves()
    engine.update(batch)
    engine.save(tmp_path / "0", in_background=True)

    with pytest.raises(CheckpointUnwritableError, match="the driver cannot pin so much"):
        wait_until_saved(engine)


def test_copies_that_fail_are_reported_and_hold_up_no_update(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Offloader, state: dict[str, Any]) -> Any:
        def copy() -> dict[str, Any]:
            raise RuntimeError("the driver cannot pin so much")

        return copy

    engine, other = make_policy(parallel, model_path), make_policy(parallel, model_path)
    monkeypatch.setattr(Offloader, "copying", refuse)
    engine.save(tmp_path / "step", in_background=True)
    metrics = engine.update(batch)
    metrics.pop(WAITED)
    assert metrics == other.update(batch)
    with pytest.raises(CheckpointUnwritableError, match=r"step cannot be written: the driver cannot pin so much"):
        wait_until_saved(engine)
