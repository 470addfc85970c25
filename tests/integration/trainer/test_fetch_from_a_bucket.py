"""Models and data from a real S3 server: as a whole, from where a download was cut off, and without rights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.sources import localized
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.checkpoints.bucket import Bucket
from ppojob_trainer.commands.fetch import FetchError, FetchRefusedError, State, fetch_all
from tests.good_spec import with_changes
from tests.integration.trainer.s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.usefixtures("s3_environment")]

WEIGHTS = bytes(range(256)) * 65_536
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture(scope="module", autouse=True)
def _filled(server: S3Server) -> None:
    obstore.put(server.store, "models/tiny/config.json", json.dumps(CONFIG).encode())
    obstore.put(server.store, "models/tiny/model.safetensors", WEIGHTS)
    obstore.put(server.store, "models/tiny/README.md", b"not needed")
    obstore.put(server.store, "data/train.jsonl", b'{"prompt": "1+1?"}\n')


def job_of(storage: Path, model: str, data: str = f"s3://{BUCKET}/data/train.jsonl") -> JobFile:
    changes: dict[tuple[str | int, ...], Any] = {
        ("spec", "model", "actor", "path"): model,
        ("spec", "data", "train"): {"files": {"paths": [data]}},
        ("spec", "storage", "mountPath"): str(storage),
    }
    spec, sources = localized(resolve(parse_manifest(with_changes(changes))[2]), str(storage))
    return JobFile(namespace="a", name="b", uid="u", root=str(storage / "job"), spec=spec, sources=sources)


def test_a_model_and_a_file_of_data(tmp_path: Path) -> None:
    job, state = job_of(tmp_path, f"s3://{BUCKET}/models/tiny"), State()

    fetch_all(job, state, "tests")

    assert (Path(job.spec.model.actor.path) / "model.safetensors").read_bytes() == WEIGHTS
    assert not (Path(job.spec.model.actor.path) / "README.md").exists()
    assert next(source.bytes for source in state.sources) == len(b'{"prompt": "1+1?"}\n')


def test_a_download_continues_by_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, offsets, stream = job_of(tmp_path, f"s3://{BUCKET}/models/tiny"), list[int](), Bucket.stream

    def cut_off(self: Bucket, name: str, *, offset: int, e_tag: str) -> Iterator[bytes]:
        offsets.append(offset)
        received = 0
        for chunk in stream(self, name, offset=offset, e_tag=e_tag):
            yield chunk
            received += len(chunk)
            if name == "model.safetensors" and len(offsets) < 6 and received > 2**20:
                raise KeyboardInterrupt

    monkeypatch.setattr(Bucket, "stream", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fetch_all(job, State(), "tests")
    monkeypatch.setattr(Bucket, "stream", stream)
    [part] = Path(job.sources[0].folder).parent.rglob(".model.safetensors.*.incomplete")
    assert 2**20 < part.stat().st_size < len(WEIGHTS)

    fetch_all(job, State(), "tests")

    assert (Path(job.spec.model.actor.path) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "s3://no-such-bucket/x",
            "spec.model.actor.path s3://no-such-bucket/x cannot be used: there is no such bucket",
        ),
        (f"s3://{BUCKET}/nothing", f"spec.model.actor.path s3://{BUCKET}/nothing: there is nothing below"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises(FetchRefusedError, match=words):
        fetch_all(job_of(tmp_path, model), State(), "tests")


def test_a_store_that_is_down_may_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr("ppojob_trainer.checkpoints.bucket.RETRY_LIMIT", timedelta(seconds=1))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    with pytest.raises(FetchError, match="check the store, the network to it") as failure:
        fetch_all(job_of(tmp_path, f"s3://{BUCKET}/models/tiny"), State(), "tests")

    assert not isinstance(failure.value, FetchRefusedError)
