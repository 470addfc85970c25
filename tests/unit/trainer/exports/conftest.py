"""An exported folder, and the places where it is uploaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from ppojob_trainer.exports import uploads
from ppojob_trainer.exports.target import Export
from tests.unit.trainer.exports import upload_hub
from tests.unit.trainer.exports.upload_hub import TOKEN, UploadHub

FILES = {
    "README.md": b"---\nlibrary_name: transformers\n---\n# products\n",
    "adapter/adapter_model.safetensors": b"a" * 100,
    "config.json": b"{}",
    "model.safetensors": b"m" * 5000,
}

MakeExport = Callable[..., Export]


@pytest.fixture
def make_export(tmp_path: Path) -> MakeExport:
    def make(step: int = 8, *, uid: str = "u", files: dict[str, bytes] = FILES, has_own_place: bool = False) -> Export:
        folder = tmp_path / f"export-{step}-{len(list(tmp_path.iterdir()))}"
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return Export(folder, step, uid, has_own_place)

    return make


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with upload_hub.serving() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # Large files go by git-LFS: hf_xet needs the hub's own storage.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(uploads, "LONGEST_WAIT_S", 0.0)
