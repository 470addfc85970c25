"""torch's checkpoints in an object store: what was saved is loaded, whatever its size, and nothing half is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.exceptions import GenericError
from obstore.store import MemoryStore
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_trainer.checkpoints import bucket
from ppojob_trainer.engines.errors import BucketFailedError, CheckpointUnreadableError
from ppojob_trainer.engines.train.fsdp import object_storage
from ppojob_trainer.engines.train.fsdp.object_storage import ObjectFiles, has_metadata, is_used, reader_of, writer_of
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.main.failures import failure_record
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.test_engine_checkpoint import make_policy, wait_for

ADDRESS = "s3://bucket/step-4.attempt-0/actor"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The only bucket there is."""
    memory = MemoryStore()
    monkeypatch.setattr(bucket, "from_url", lambda address, **options: memory)
    return memory


def keys(store: MemoryStore) -> list[str]:
    return sorted(found["path"] for page in obstore.list(store) for found in page)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ahead", [64, 8 * 1024 * 1024])
@pytest.mark.parametrize("largest", [1000, 16 * 1024 * 1024])
def test_what_was_saved_is_loaded(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, ahead: int, largest: int
) -> None:
    monkeypatch.setattr(object_storage, "_READ_AHEAD", ahead)
    monkeypatch.setattr(object_storage._Parts, "_LARGEST", largest)
    saved: dict[str, Any] = {f"layer-{size}": torch.randn(size) for size in (1, 100, 300_000)} | {"step": 4}
    save(dict(saved), storage_writer=writer_of(ADDRESS), no_dist=True)
    found: dict[str, Any] = {name: torch.zeros(value.shape) for name, value in saved.items() if name != "step"}

    load(found, storage_reader=reader_of(ADDRESS), no_dist=True)

    assert all(torch.equal(found[name], saved[name]) for name in found)
    assert keys(store) == [f"step-4.attempt-0/actor/{name}" for name in (".metadata", "__0_0_0.distcp")]
    assert has_metadata(ADDRESS)
    assert is_used(ADDRESS)
    assert not is_used("s3://bucket/step-4.attempt-0/act")


def test_a_folder_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    assert type(reader_of(tmp_path)) is FileSystemReader
    assert not has_metadata(str(tmp_path))
    assert not is_used(tmp_path)


def test_a_file_whose_writing_failed_is_not_there(store: MemoryStore) -> None:
    def fail() -> None:
        with ObjectFiles(store).create_stream("half", "wb") as stream:
            stream.write(b"begun")  # type: ignore[attr-defined]
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert keys(store) == []


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("in_background", [False, True])
def test_an_update_after_loading_from_a_bucket_equals_the_one_after_saving(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, in_background: bool
) -> None:
    saved = make_policy(parallel, model_path)
    saved.update(batch)
    saved.save(ADDRESS, in_background=in_background)
    metrics = saved.update(batch)
    assert ("timing_s/checkpoint/wait_actor" in metrics) == in_background
    metrics.pop("timing_s/checkpoint/wait_actor", None)
    wait_for(saved)
    resumed = make_policy(parallel, model_path)

    resumed.restore(ADDRESS)

    assert resumed.update(batch) == metrics


@pytest.mark.usefixtures("store")
def test_an_address_that_has_something_is_not_written_to(parallel: ParallelMesh, model_path: Path) -> None:
    engine = make_policy(parallel, model_path)
    engine.save(ADDRESS)

    with pytest.raises(FileExistsError, match="need a new folder"):
        engine.save(ADDRESS)


def test_what_cannot_be_read_from_a_bucket_is_refused_by_name(
    store: MemoryStore, parallel: ParallelMesh, model_path: Path
) -> None:
    engine = make_policy(parallel, model_path)
    with pytest.raises(CheckpointUnreadableError, match=r"actor is not complete: it has no \.metadata"):
        engine.restore(ADDRESS)
    engine.save(ADDRESS)
    shard = "step-4.attempt-0/actor/__0_0_0.distcp"
    obstore.put(store, shard, bytes(obstore.get(store, shard).bytes())[:1000])

    with pytest.raises(CheckpointUnreadableError, match="actor cannot be read into this model"):
        engine.restore(ADDRESS)


def test_a_store_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, parallel: ParallelMesh, model_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nowhere/key.json")
    engine = make_policy(parallel, model_path)

    with pytest.raises(BucketFailedError, match=r"cannot be written: .* there are no credentials"):
        engine.save("gs://bucket/step-4.attempt-0/actor")
    with pytest.raises(BucketFailedError, match=r"cannot be read: .* there are no credentials"):
        engine.restore("gs://bucket/step-4.attempt-0/actor")


def test_a_store_that_fails_a_rank_does_not_make_a_checkpoint_unreadable(
    store: MemoryStore, parallel: ParallelMesh, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise GenericError("Generic S3 error: Server returned non-2xx status code: 503 <?xml signed")

    engine = make_policy(parallel, model_path)
    engine.save(ADDRESS)
    monkeypatch.setattr(obstore, "get_range", fail)
    monkeypatch.setattr(obstore, "open_writer", fail)

    with pytest.raises(BucketFailedError, match=r"actor cannot be read: .*status code: 503.") as read:
        engine.restore(ADDRESS)
    with pytest.raises(BucketFailedError, match=r"again cannot be written: .*status code: 503"):
        engine.save("s3://bucket/again")
    engine.save("s3://bucket/aside", in_background=True)
    with pytest.raises(BucketFailedError, match="aside cannot be written"):
        wait_for(engine)

    assert "signed" not in str(read.value)
    assert failure_record(read.value).kind is FailureKind.INFRASTRUCTURE
