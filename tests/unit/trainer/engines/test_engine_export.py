"""All ranks write an export: who writes which file, what a rank holds meanwhile, and a rank whose storage refuses."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.errors import CheckpointUnwritableError
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import export as export_module
from ppojob_trainer.engines.train.fsdp import export_files, lora
from ppojob_trainer.engines.train.fsdp.export_files import ExportFiles, PlannedFile, plan_files
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines import option_ranks
from tests.unit.trainer.engines.peer_ranks import Work
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.two_ranks import make_policy


def tensors_of(sizes: list[int]) -> dict[str, Tensor]:
    """Tensors without memory, of so many bytes each."""
    return {f"t{number}": torch.empty(size, dtype=torch.uint8, device="meta") for number, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("num_files", "num_ranks", "writers"),
    [
        (1, 8, [0]),
        # Two hosts of four ranks, then four hosts.
        (2, 8, [0, 4]),
        (4, 16, [0, 4, 8, 12]),
        (3, 8, [0, 2, 5]),
        (4, 4, [0, 1, 2, 3]),
        (5, 2, [0, 1, 0, 1, 0]),
        (3, 1, [0, 0, 0]),
    ],
)
def test_the_files_are_divided_among_the_ranks(num_files: int, num_ranks: int, writers: list[int]) -> None:
    plan = plan_files(tensors_of([10] * num_files), num_ranks, max_bytes=10)
    assert [file.writer for file in plan.files] == writers
    assert [file for rank in range(num_ranks) for file in plan.of(rank)] == sorted(plan.files, key=lambda of: of.writer)


def test_each_tensor_is_in_one_file_and_the_number_of_ranks_changes_no_file() -> None:
    tensors = tensors_of([4, 3, 5, 12, 2, 2])
    of_one, of_many = (plan_files(tensors, num_ranks, max_bytes=9) for num_ranks in (1, 3))
    assert of_one.index == of_many.index
    assert [(file.name, file.tensors) for file in of_one.files] == [(file.name, file.tensors) for file in of_many.files]
    assert sorted(name for file in of_one.files for name in file.tensors) == sorted(tensors)
    sizes = [sum(tensors[name].nbytes for name in file.tensors) for file in of_one.files]
    assert sum(size > 9 for size in sizes) == 1, "only the tensor that is larger than a file"
    assert of_one.index is not None
    assert of_one.index["metadata"] == {"total_parameters": 28, "total_size": 28}
    assert of_one.index["weight_map"] == {name: file.name for file in of_one.files for name in file.tensors}


def test_a_single_file_needs_no_index() -> None:
    plan = plan_files(tensors_of([4, 3]), 2, max_bytes=9)
    assert [file.name for file in plan.files] == ["model.safetensors"]
    assert plan.index is None


TWO_FILES = [PlannedFile("first", frozenset({"a", "b"}), 0), PlannedFile("second", frozenset({"c", "d"}), 0)]


def test_a_rank_takes_nothing_of_its_next_file_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write = threading.Event(), export_files._write

    def late(path: Path, tensors: dict[str, Tensor]) -> None:
        assert may_write.wait(60)
        write(path, tensors)

    monkeypatch.setattr(export_files, "_write", late)
    files = ExportFiles(tmp_path, TWO_FILES)
    files.add("a", torch.ones(2))
    files.add("b", torch.ones(3))
    # The first file is being written, and the caller went on.
    taking = threading.Thread(target=files.add, args=("c", torch.ones(4)))
    taking.start()
    taking.join(0.2)
    assert taking.is_alive()
    assert not list(tmp_path.iterdir())
    may_write.set()
    taking.join(60)
    files.add("d", torch.ones(5))
    assert files.finish() is None
    written = {file.name: set(load_file(file)) for file in tmp_path.iterdir()}
    assert written == {"first": {"a", "b"}, "second": {"c", "d"}}


def full(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_rank_whose_storage_refuses_writes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ExportFiles(tmp_path, TWO_FILES)
    assert set(files.names) == {"a", "b", "c", "d"}
    with monkeypatch.context() as patch:
        patch.setattr(export_files, "save_file", full)
        files.add("a", torch.ones(2))
        files.add("b", torch.ones(3))
        assert files._running is not None
        wait([files._running], timeout=60)
    for name in ("c", "d"):
        files.add(name, torch.ones(4))
    assert not files.names
    assert "No space left on device" in str(files.finish())
    assert not list(tmp_path.iterdir())


def failing_export(parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path) -> dict[str, Any]:
    """Export, while the storage of rank 1 is full; return what the rank said."""
    if parallel.rank == 1:
        export_files.save_file = full
    export_module.SHARD_BYTES = option_ranks.FILE_BYTES  # type: ignore[misc]
    policy = make_policy(parallel, model)
    with pytest.raises(CheckpointUnwritableError) as found:
        policy.export(folder / "export")
    return {"said": str(found.value)}


def export_without_adapters(parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path) -> dict[str, Any]:
    """Export, while rank 0 cannot write the first bytes of the adapters; return what the rank said."""
    if parallel.rank == 0:
        lora._header = full  # type: ignore[assignment]
    policy = make_policy(parallel, model, lora=LoRA(rank=2))
    with pytest.raises(CheckpointUnwritableError) as found:
        policy.export(folder / "export")
    return {"said": str(found.value)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "work", "failed"),
    [(2, export_without_adapters, 0), (3, failing_export, 1)],
    ids=["adapters", "weights"],
)
def test_if_one_rank_cannot_write_all_say_so_and_none_waits(
    model_path: Path, tmp_path: Path, num_ranks: int, work: Work, failed: int
) -> None:
    run_ranks(ParallelDims(shard=num_ranks), model_path, tmp_path, work)
    for rank in range(num_ranks):
        said = torch.load(tmp_path / f"rank-{rank}.pt")["said"]
        assert f"export cannot be written: rank {failed}: [Errno 28] No space left on device" in said
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert not {"model.safetensors.index.json", "config.json"} & names
    if work is failing_export:
        assert "model-00001-of-00009.safetensors" in names
        assert "model-00002-of-00009.safetensors" not in names
