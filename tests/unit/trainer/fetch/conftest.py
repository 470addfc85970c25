"""A hub on loopback, a storage, and jobs whose models and data are named by address."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.sources import localized
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.storage_lock import LockTimes
from tests.good_spec import with_changes
from tests.unit.trainer.fetch.hub_server import Hub, Repository, serving

MODEL, DATA = "acme/tiny", "acme/sums"
WEIGHTS = bytes(range(256)) * 1024
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
FAST = LockTimes(beat=0.2, stale=2.0, poll=0.1)

MakeJob = Callable[..., JobFile]


def parquet(**columns: list[Any]) -> bytes:
    """Return a Parquet file."""
    target = io.BytesIO()
    pq.write_table(pa.table(columns), target)
    return target.getvalue()


def model_files(**config: Any) -> dict[str, bytes]:
    """Return a model with one file of weights, and files that nobody needs."""
    return {
        "config.json": json.dumps({**CONFIG, **config}).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"the same weights again",
        "modeling_own.py": b"raise SystemExit('code of the repository was run')",
        "original/consolidated.00.pth": b"and again",
        "README.md": b"# Tiny",
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        found.repositories["models", MODEL] = Repository(model_files())
        files = {"main/train.parquet": parquet(question=["1+1?"], answer=["2"]), "README.md": b"# Sums"}
        found.repositories["datasets", DATA] = Repository(files, commit="d" * 40)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.url)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


@pytest.fixture
def make_job(storage: Path) -> MakeJob:
    """Make the job file of a job with these addresses, as the operator writes it."""

    def make(model: str = f"hf://{MODEL}", train: dict[str, Any] | None = None, **actor: Any) -> JobFile:
        changes: dict[Any, Any] = {
            ("spec", "model", "actor"): {"path": model, **actor},
            ("spec", "storage", "mountPath"): str(storage),
        }
        if train is not None:
            changes["spec", "data", "train"] = train
        spec, sources = localized(resolve(parse_manifest(with_changes(changes))[2]), str(storage))
        return JobFile(namespace="a", name="b", uid="u", root=str(storage / "job"), spec=spec, sources=sources)

    return make


def files_source(*paths: str, **columns: str) -> dict[str, Any]:
    """Return data.train with Parquet files."""
    return {"files": {"paths": list(paths), **columns}}
