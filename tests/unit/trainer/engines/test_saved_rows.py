"""Responses that wait for their training, in a file of a checkpoint or at a key of a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from obstore.store import MemoryStore

from ppojob_trainer.engines.errors import CheckpointUnreadableError, CheckpointUnwritableError
from ppojob_trainer.engines.saved_rows import load_rows, save_rows

ROWS = {
    "responses": torch.tensor([[5, 7, 0], [1, 2, 3]]),
    "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    "rollout_log_probs": torch.tensor([[-0.1, -float("inf"), 0.0], [-1.0, -2.0, -3.0]]),
    "flipped": torch.arange(6).reshape(2, 3).T,
}


@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_rows_come_back_as_they_were(tmp_path: Path, memory: MemoryStore, is_in_bucket: bool) -> None:
    location = f"{'s3://bucket/run/step-3' if is_in_bucket else tmp_path}/queue/0.safetensors"

    save_rows(location, ROWS)
    found = load_rows(location)

    assert found.keys() == ROWS.keys()
    for name, tensor in ROWS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


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


def test_a_storage_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "queue").write_text("a file in the folder's place")

    with pytest.raises(CheckpointUnwritableError, match="storage's space and rights"):
        save_rows(f"{tmp_path}/queue/0.safetensors", ROWS)
