"""Uploads to a bucket: the last key completes an export, and nothing of another run is overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_trainer.exports import (
    UploadCredentialsError,
    UploadFailedError,
    UploadRefusedError,
    open_target,
    upload,
    uploads,
)
from ppojob_trainer.exports.target import MANIFEST
from ppojob_trainer.main.failures import failure_record
from tests.unit.trainer.exports.conftest import FILES, MakeExport

ADDRESS = "s3://bucket/models/products"


def keys(store: MemoryStore, prefix: str = "models/products") -> dict[str, bytes]:
    found = [each["path"] for page in obstore.list(store, prefix=prefix) for each in page]
    return {path.removeprefix(f"{prefix}/"): bytes(obstore.get(store, path).bytes()) for path in found}


def manifest(store: MemoryStore, prefix: str = "models/products") -> dict[str, object]:
    found: dict[str, object] = json.loads(keys(store, prefix)[MANIFEST])
    return found


@pytest.fixture
def puts(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are written, in order."""
    written: list[str] = []
    put = obstore.put

    def recorded(store: MemoryStore, path: str, *args: Any, **options: Any) -> Any:
        written.append(path.removeprefix("models/products/"))
        return put(store, path, *args, **options)

    monkeypatch.setattr(obstore, "put", recorded)
    return written


def test_the_files_come_first_and_the_last_key_completes_them(
    memory: MemoryStore, puts: list[str], make_export: MakeExport
) -> None:
    signs: list[None] = []

    address = upload(open_target(ADDRESS), make_export(), lambda: signs.append(None))

    assert address == ADDRESS
    assert puts == [*FILES, MANIFEST]
    found = keys(memory)
    assert {name: found[name] for name in FILES} == FILES
    assert (manifest(memory)["uid"], manifest(memory)["step"]) == ("u", 8)
    assert manifest(memory)["files"] == {name: len(content) for name, content in FILES.items()}
    assert len(signs) == len(FILES)


def test_a_manifest_in_the_folder_is_no_file_of_the_model(memory: MemoryStore, make_export: MakeExport) -> None:
    upload(open_target(ADDRESS), make_export(files={**FILES, MANIFEST: b"of the base model"}), lambda: None)

    assert set(manifest(memory)["files"]) == set(FILES)  # type: ignore[call-overload]


def test_each_export_has_a_separate_place(memory: MemoryStore, make_export: MakeExport) -> None:
    for step in (8, 16):
        export = make_export(step, has_own_place=True)
        assert upload(open_target(ADDRESS), export, lambda: None) == f"{ADDRESS}/step-{step}"

    assert manifest(memory, "models/products/step-8")["step"] == 8
    assert MANIFEST not in keys(memory)


def test_an_export_that_is_complete_is_not_uploaded_again(
    memory: MemoryStore, puts: list[str], make_export: MakeExport
) -> None:
    export = make_export()
    upload(open_target(ADDRESS), export, lambda: None)
    puts.clear()

    assert upload(open_target(ADDRESS), export, lambda: None) == ADDRESS

    assert [name for name in puts if name != MANIFEST] == []


@pytest.mark.parametrize("change", ["content", "key"])
def test_what_differs_is_uploaded_again(
    memory: MemoryStore, puts: list[str], make_export: MakeExport, change: str
) -> None:
    export = make_export()
    upload(open_target(ADDRESS), export, lambda: None)
    puts.clear()
    if change == "key":
        obstore.delete(memory, "models/products/model.safetensors")
    else:
        # Of the same size, as another export of the same step.
        weights = export.folder / "model.safetensors"
        weights.write_bytes(b"n" * 5000)
        os.utime(weights, (2e9, 2e9))

    upload(open_target(ADDRESS), export, lambda: None)

    assert puts == [*FILES, MANIFEST]
    assert keys(memory)["model.safetensors"] == (export.folder / "model.safetensors").read_bytes()


def test_a_new_export_removes_the_files_of_the_one_before(memory: MemoryStore, make_export: MakeExport) -> None:
    upload(open_target(ADDRESS), make_export(), lambda: None)
    obstore.put(memory, "models/products/mine", b"somebody's")

    upload(open_target(ADDRESS), make_export(16, files={"config.json": b"16"}), lambda: None)

    assert set(keys(memory)) == {"config.json", "mine", MANIFEST}


def test_an_upload_that_ends_early_leaves_nothing_that_looks_complete(
    memory: MemoryStore, make_export: MakeExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(open_target(ADDRESS), make_export(), lambda: None)

    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(open_target(ADDRESS), make_export(16), end)
    assert MANIFEST not in keys(memory)

    upload(open_target(ADDRESS), make_export(16), lambda: None)
    assert manifest(memory)["step"] == 16


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    tries: list[str] = []
    put = obstore.put

    def fail(store: MemoryStore, path: str, *args: Any, **options: Any) -> Any:
        tries.append(path)
        if len(tries) <= times:
            raise GenericError("Generic S3 error: Server returned non-2xx status code: 503 <?xml signed")
        return put(store, path, *args, **options)

    monkeypatch.setattr(obstore, "put", fail)
    return tries


def test_a_store_that_fails_for_a_while_is_tried_again(
    memory: MemoryStore, make_export: MakeExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = failing(monkeypatch, times=3)

    upload(open_target(ADDRESS), make_export(), lambda: None)

    assert tries[:4] == ["models/products/README.md"] * 4
    assert set(keys(memory)) == {*FILES, MANIFEST}


def test_a_store_that_does_not_recover_is_named(
    memory: MemoryStore, make_export: MakeExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = failing(monkeypatch, times=1000)

    with pytest.raises(
        UploadFailedError, match=r"^checkpoint\.exportTo s3://bucket/models/products cannot be used: .*503"
    ) as failed:
        upload(open_target(ADDRESS), make_export(), lambda: None)

    assert len(tries) == uploads.ATTEMPTS
    assert "signed" not in str(failed.value)


def test_the_model_of_another_run_is_refused_before_the_run_and_at_the_upload(
    memory: MemoryStore, make_export: MakeExport
) -> None:
    upload(open_target(ADDRESS), make_export(uid="another", has_own_place=True), lambda: None)
    before = keys(memory)
    words = r"products/step-8 holds the model of another run \(uid another, this run has u\); create the job with"

    with pytest.raises(UploadRefusedError, match=words) as refused:
        open_target(ADDRESS).check("u")
    with pytest.raises(UploadRefusedError, match=words):
        upload(open_target(ADDRESS), make_export(has_own_place=True), lambda: None)

    assert keys(memory) == before
    assert failure_record(refused.value).reason == "UploadRefused"
    assert failure_record(refused.value).kind is FailureKind.PERMANENT


def test_a_place_that_can_be_used_is_accepted_and_left_as_it_was(memory: MemoryStore, make_export: MakeExport) -> None:
    upload(open_target(ADDRESS), make_export(), lambda: None)
    before = keys(memory)

    open_target(ADDRESS).check("u")

    assert keys(memory) == before


def test_without_credentials_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "nowhere.json"))

    with pytest.raises(
        UploadCredentialsError, match=r"checkpoint\.exportTo gs://bucket/models .*there are no credentials"
    ):
        open_target("gs://bucket/models").check("u")
