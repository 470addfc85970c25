"""Responses that wait for their training, in a file of a checkpoint or at a key of a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore
from safetensors.torch import save_file

from ppojob_trainer.engines.errors import CheckpointUnreadableError, CheckpointUnwritableError
from ppojob_trainer.engines.saved_rows import load_rows, save_rows
from ppojob_trainer.protocol import Ragged

ROWS = {
    "input_ids": Ragged.from_rows([[5, 7], [1, 2, 3, 4]], torch.int32),
    "response_mask": Ragged.from_rows([[True], [False, True, True]], torch.bool),
    "rollout_log_probs": Ragged.from_rows([[-float("inf")], [-1.0, -2.0, -3.0]], torch.float32),
    "routed_experts": Ragged.from_rows([[3, 255], [0, 1, 2, 3, 4, 5]], torch.uint8),
    "part": Ragged.from_rows([[1], [2, 3], [4]], torch.int32).take(slice(1, 3)),
}


@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_rows_come_back_as_they_were(tmp_path: Path, memory: MemoryStore, is_in_bucket: bool) -> None:
    location = f"{'s3://bucket/run/step-3' if is_in_bucket else tmp_path}/queue/0.safetensors"

    save_rows(location, ROWS)
    found = load_rows(location)

    assert found.keys() == ROWS.keys()
    for name, column in ROWS.items():
        assert found[name].to_lists() == column.to_lists()
        assert found[name].dtype == column.dtype


@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_rows_that_are_missing_are_named(tmp_path: Path, memory: MemoryStore, is_in_bucket: bool) -> None:
    location = f"{'s3://bucket/run/step-3' if is_in_bucket else tmp_path}/queue/0.safetensors"

    with pytest.raises(CheckpointUnreadableError, match=r"queue/0\.safetensors"):
        load_rows(location)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.safetensors"
    path.write_bytes(b"no tensors")

    with pytest.raises(CheckpointUnreadableError, match="cannot be read"):
        load_rows(str(path))


def test_padded_rows_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.safetensors"
    save_file({"responses": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)}, path)

    with pytest.raises(CheckpointUnreadableError, match="Earlier versions wrote padded tensors: resume with the image"):
        load_rows(str(path))


def test_a_storage_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "queue").write_text("a file in the folder's place")

    with pytest.raises(CheckpointUnwritableError, match="storage's free space and permissions"):
        save_rows(f"{tmp_path}/queue/0.safetensors", ROWS)
