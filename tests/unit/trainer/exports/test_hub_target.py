"""Uploads to a hub: the real client against a small hub on loopback."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi, constants

from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_trainer.exports import (
    UploadCredentialsError,
    UploadFailedError,
    UploadRefusedError,
    open_target,
    upload,
)
from ppojob_trainer.main.failures import failure_record
from tests.unit.trainer.exports.conftest import FILES, MakeExport
from tests.unit.trainer.exports.upload_hub import Repository, UploadHub

# huggingface_hub's own way to send a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ADDRESS = "hf://team/products"
ATTRIBUTES = {".gitattributes": b"lfs"}


def test_a_model_becomes_one_commit_of_a_private_repository(hub: UploadHub, make_export: MakeExport) -> None:
    signs: list[None] = []

    address = upload(open_target(ADDRESS), make_export(), lambda: signs.append(None))

    assert address == ADDRESS
    repository = hub.repositories["team/products"]
    assert repository.is_private
    assert repository.files == FILES | ATTRIBUTES
    assert (repository.messages, repository.tags) == (["Policy after step 8"], {})
    assert len(signs) == len(FILES)


def test_the_same_export_again_adds_no_commit(hub: UploadHub, make_export: MakeExport) -> None:
    export = make_export()
    upload(open_target(ADDRESS), export, lambda: None)

    assert upload(open_target(ADDRESS), export, lambda: None) == ADDRESS

    assert len(hub.repositories["team/products"].messages) == 1


def test_another_export_replaces_what_is_there_and_the_history_keeps_it(
    hub: UploadHub, make_export: MakeExport
) -> None:
    hub.repositories["team/products"] = Repository(is_private=False)
    upload(open_target(ADDRESS), make_export(), lambda: None)
    later = {"config.json": b'{"later": 1}', "model-00001-of-00001.safetensors": b"n" * 10}

    upload(open_target(ADDRESS), make_export(16, files=later), lambda: None)

    repository = hub.repositories["team/products"]
    assert repository.files == later | ATTRIBUTES
    assert repository.commits[-2][1] == FILES | ATTRIBUTES
    assert not repository.is_private, "the visibility of an existing repository is its owner's"


def test_each_export_is_a_tag_and_a_step_that_is_exported_again_moves_it(
    hub: UploadHub, make_export: MakeExport
) -> None:
    for step, files in ((8, FILES), (16, {"config.json": b"16"}), (8, {"config.json": b"8"})):
        export = make_export(step, files=files, has_own_place=True)
        assert upload(open_target(ADDRESS), export, lambda: None) == f"{ADDRESS}@step-{step}"

    repository = hub.repositories["team/products"]
    assert repository.at("step-16") == {"config.json": b"16"} | ATTRIBUTES
    assert repository.at("step-8") == {"config.json": b"8"} | ATTRIBUTES


@pytest.mark.parametrize(
    "path", ["repos/create", "preupload", "objects/batch", "PUT /objects", "tree/main", "commit/main", "tag/[0-9a-f]+"]
)
def test_a_hub_that_fails_for_a_while_is_tried_again(hub: UploadHub, make_export: MakeExport, path: str) -> None:
    hub.fail(path, 500)

    upload(open_target(ADDRESS), make_export(has_own_place=True), lambda: None)

    assert hub.failures == []
    assert hub.repositories["team/products"].at("step-8") == FILES | ATTRIBUTES


def test_a_hub_that_does_not_recover_is_named(
    hub: UploadHub, make_export: MakeExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail("commit/main", 500, times=100)

    with pytest.raises(
        UploadFailedError, match=r"checkpoint\.exportTo hf://team/products cannot be used: the hub answers 500"
    ):
        upload(open_target(ADDRESS), make_export(), lambda: None)

    assert hub.repositories["team/products"].messages == [], "readers see nothing of it"


def test_a_hub_that_cannot_be_reached_is_named(
    hub: UploadHub, make_export: MakeExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(UploadFailedError, match="check the hub, the network to it, and HF_ENDPOINT"):
        upload(open_target(ADDRESS), make_export(), lambda: None)


@pytest.mark.parametrize(
    ("status", "words"), [(403, "give a token that may write there as HF_TOKEN"), (413, "correct")]
)
def test_a_refusal_is_not_tried_again(hub: UploadHub, make_export: MakeExport, status: int, words: str) -> None:
    hub.fail("commit/main", status, times=2)

    with pytest.raises(UploadRefusedError, match=words):
        upload(open_target(ADDRESS), make_export(), lambda: None)

    assert len(hub.failures) == 1


def test_a_signed_address_is_not_repeated(hub: UploadHub, make_export: MakeExport) -> None:
    hub.fail("PUT /objects", 403, times=100)

    with pytest.raises(UploadRefusedError) as refused:
        upload(open_target(ADDRESS), make_export(), lambda: None)

    assert "signed-secret" not in str(refused.value)


def test_a_signed_address_in_the_error_of_a_connection_is_not_repeated(
    hub: UploadHub, make_export: MakeExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*arguments: object, **options: object) -> None:
        raise OSError("PUT http://store/x?signature=signed-secret was cut")

    monkeypatch.setattr(HfApi, "preupload_lfs_files", cut)

    with pytest.raises(UploadFailedError, match=r"OSError: PUT http://store/x was cut; check the hub"):
        upload(open_target(ADDRESS), make_export(), lambda: None)


# Before a run begins.


def test_a_repository_that_can_be_created_or_written_is_accepted_and_none_is_created(hub: UploadHub) -> None:
    open_target(ADDRESS).check("u")
    assert hub.repositories == {}

    hub.repositories["others/products"] = Repository(is_private=True)
    open_target("hf://others/products").check("u")


def test_a_foreign_organisation_is_refused(hub: UploadHub) -> None:
    with pytest.raises(UploadRefusedError, match="the token's account somebody does not belong to others"):
        open_target("hf://others/products").check("u")


@pytest.mark.parametrize("exists", [False, True])
def test_a_token_that_may_only_read_is_refused(hub: UploadHub, exists: bool) -> None:
    hub.role = "read"
    if exists:
        hub.repositories["team/products"] = Repository(is_private=True)

    with pytest.raises(UploadRefusedError, match="give a token that may write there as HF_TOKEN"):
        open_target(ADDRESS).check("u")


def test_a_token_that_the_hub_does_not_know_is_refused(hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another-secret")

    with pytest.raises(UploadRefusedError, match="the hub answers 401") as refused:
        open_target(ADDRESS).check("u")

    assert failure_record(refused.value).kind is FailureKind.PERMANENT
    assert "another-secret" not in str(refused.value)


def test_without_a_token_the_remedy_is_said(hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")

    with pytest.raises(UploadCredentialsError, match="there is no token; give a token that may write there") as refused:
        open_target(ADDRESS).check("u")

    assert failure_record(refused.value).kind is FailureKind.USER


def test_an_offline_client_is_refused(hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(UploadRefusedError, match=r"HF_HUB_OFFLINE is set; remove it from spec\.env"):
        open_target(ADDRESS).check("u")
