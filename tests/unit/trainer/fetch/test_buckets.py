"""Models and data come from a bucket: whole folders, single objects, and from where a download was cut off."""

from __future__ import annotations

from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from ppojob_trainer.checkpoints import bucket
from ppojob_trainer.commands.fetch import FetchRefusedError, State, fetch_all
from ppojob_trainer.commands.fetch.folders import MARKER
from tests.unit.trainer.fetch.conftest import FAST, WEIGHTS, MakeJob, files_source, model_files, parquet

COLUMNS = {"promptColumn": "question"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    found = MemoryStore()
    monkeypatch.setattr(bucket, "from_url", lambda address, **options: found)
    for name, content in model_files().items():
        obstore.put(found, f"models/tiny/{name}", content)
    obstore.put(found, "models/tiny-2/config.json", b"of another model")
    obstore.put(found, "data/train.parquet", parquet(question=["1+1?"]))
    return found


def fetched(job: object) -> State:
    state = State()
    fetch_all(job, state, "tests", FAST)  # type: ignore[arg-type]
    return state


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_model_and_a_data_file_are_fetched(store: MemoryStore, make_job: MakeJob, scheme: str) -> None:
    job = make_job(f"{scheme}://bucket/models/tiny", files_source(f"{scheme}://bucket/data/train.parquet", **COLUMNS))

    state = fetched(job)

    folder = Path(job.spec.model.actor.path)
    assert folder.parent.parts[-2:] == (scheme, "bucket")
    assert sorted(path.name for path in folder.iterdir()) == [
        MARKER, "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert job.spec.data.train.files is not None
    assert Path(job.spec.data.train.files.paths[0]).read_bytes() == parquet(question=["1+1?"])
    assert [source.revision for source in state.sources] == [None, None]


def test_a_download_continues_where_it_was_cut_off(
    store: MemoryStore, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, offsets = make_job("s3://bucket/models/tiny"), []
    stream = bucket.Bucket.stream

    def cut_off(self: bucket.Bucket, name: str, *, offset: int, e_tag: str) -> object:
        whole = b"".join(stream(self, name, offset=offset, e_tag=e_tag))
        yield whole[: len(whole) // 2]
        if name == "model.safetensors":
            raise KeyboardInterrupt
        yield whole[len(whole) // 2 :]

    monkeypatch.setattr(bucket.Bucket, "stream", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fetched(job)

    def seen(self: bucket.Bucket, name: str, *, offset: int, e_tag: str) -> object:
        offsets.append((name, offset))
        return stream(self, name, offset=offset, e_tag=e_tag)

    monkeypatch.setattr(bucket.Bucket, "stream", seen)
    fetched(job)

    assert ("model.safetensors", len(WEIGHTS) // 2) in offsets
    assert (Path(job.spec.model.actor.path) / "model.safetensors").read_bytes() == WEIGHTS


def test_files_of_another_version_are_downloaded_again(
    store: MemoryStore, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("s3://bucket/models/tiny")
    stream = bucket.Bucket.stream

    def cut_off(self: bucket.Bucket, name: str, *, offset: int, e_tag: str) -> object:
        whole = b"".join(stream(self, name, offset=offset, e_tag=e_tag))
        if name == "model.safetensors":
            yield whole[:100]
            raise KeyboardInterrupt
        yield whole

    monkeypatch.setattr(bucket.Bucket, "stream", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fetched(job)
    monkeypatch.setattr(bucket.Bucket, "stream", stream)
    # Of the same sizes: one whose half is there, and one that is there completely.
    newer = bytes(reversed(WEIGHTS))
    obstore.put(store, "models/tiny/model.safetensors", newer)
    obstore.put(store, "models/tiny/tokenizer.json", b"[]")

    fetched(job)

    assert (Path(job.spec.model.actor.path) / "model.safetensors").read_bytes() == newer
    assert (Path(job.spec.model.actor.path) / "tokenizer.json").read_bytes() == b"[]"


@pytest.mark.parametrize(
    ("model", "train", "words"),
    [
        ("s3://bucket/nothing", None, "spec.model.actor.path s3://bucket/nothing: there is nothing below this address"),
        (
            "s3://bucket/models/tiny",
            "s3://bucket/data/test.parquet",
            r"spec.data.train.files.paths\[0\] .*: there is no such object",
        ),
    ],
)
def test_what_is_not_there_is_refused(
    store: MemoryStore, make_job: MakeJob, model: str, train: str | None, words: str
) -> None:
    with pytest.raises(FetchRefusedError, match=words):
        fetched(make_job(model, files_source(train) if train else None))
