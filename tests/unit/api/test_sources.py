"""Addresses: which are valid, where they are fetched to, and what job.json says of them."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.sources import (
    HubAddress,
    SourceKind,
    addresses,
    has_addresses,
    hub_address,
    localized,
    problem,
    with_addresses,
)
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from tests.good_spec import with_changes

MODEL, DATA_SET, DATA_FILE = SourceKind.MODEL, SourceKind.DATA_SET, SourceKind.DATA_FILE


def spec_of(model: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> PPOJobSpec:
    changes: dict[Any, Any] = {}
    if model is not None:
        changes["spec", "model"] = model
    if train is not None:
        changes["spec", "data", "train"] = train
    return resolve(parse_manifest(with_changes(changes))[2])


def paths(spec: PPOJobSpec) -> dict[str, str]:
    return {field: value for field, value, _ in addresses(spec)}


MIXTURE = {
    "mixture": [
        {"name": "own", "files": {"paths": ["/data/a.jsonl", "s3://bucket/b.jsonl"]}},
        {"name": "gym", "weight": 2, "reasoningGym": {"task": "gcd"}},
        {"name": "gsm8k", "huggingFace": {"path": "hf://openai/gsm8k"}},
    ]
}


def test_each_source_of_a_mixture_may_be_an_address() -> None:
    spec = spec_of(train=MIXTURE)

    found, fetched = localized(spec, "/data")

    assert has_addresses(spec)
    assert [source.fields for source in fetched] == [
        ["data.train.mixture[0].files.paths[1]"],
        ["data.train.mixture[2].huggingFace.path"],
    ]
    assert paths(found)["data.train.mixture[0].files.paths[0]"] == "/data/a.jsonl"
    assert paths(found)["data.train.mixture[2].huggingFace.path"] == "/data/sources/hf/datasets/openai/gsm8k/main"
    assert not has_addresses(found)
    assert with_addresses(found, fetched) == spec


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/model", MODEL),
        ("hf://Qwen/Qwen2.5-0.5B", MODEL),
        ("hf://Qwen/Qwen2.5-0.5B@v1.0", MODEL),
        ("hf://openai/gsm8k@refs%2Fpr%2F1", DATA_SET),
        ("s3://my-bucket/models/qwen", MODEL),
        ("gs://my-bucket/qwen", DATA_SET),
        ("hf://datasets/openai/gsm8k@main/main/train-00000-of-00001.parquet", DATA_FILE),
        ("s3://bucket/train.parquet", DATA_FILE),
    ],
)
def test_valid_addresses(path: str, kind: SourceKind) -> None:
    assert problem(path, kind, "/data/x") == ""


@pytest.mark.parametrize(
    ("path", "kind", "remedy"),
    [
        ("org/name@v1", MODEL, "write hf://org/name@v1"),
        ("https://huggingface.co/datasets/openai/gsm8k", DATA_SET, "write hf://openai/gsm8k"),
        ("https://huggingface.co/datasets/openai/gsm8k", DATA_FILE, "write hf://datasets/openai/gsm8k/path/of"),
        ("hf://name", MODEL, "hf://organisation/name[@revision]"),
        ("hf://datasets/org/name", DATA_SET, "hf://organisation/name[@revision]"),
        ("hf://org/name/", MODEL, "remove the slash at its end"),
        ("s3://bucket/a//b", MODEL, "s3://bucket/prefix"),
        ("s3://bucket/../b", MODEL, "s3://bucket/prefix"),
        ("az://bucket/a", MODEL, "s3://bucket/prefix or gs://bucket/prefix"),
        ("hf://org/name/train.parquet", DATA_FILE, "hf://datasets/organisation/name[@revision]/path/file"),
        ("C:\\models", MODEL, "an absolute path such as /data/x"),
        ("", DATA_FILE, "an absolute path such as /data/x"),
    ],
)
def test_bad_addresses_get_a_remedy(path: str, kind: SourceKind, remedy: str) -> None:
    assert remedy in problem(path, kind, "/data/x")


def test_the_parts_of_an_address_of_the_hub() -> None:
    assert hub_address("hf://a/b") == HubAddress("a/b", "main", "")
    assert hub_address("hf://a/b@refs%2Fpr%2F1") == HubAddress("a/b", "refs/pr/1", "")
    assert hub_address("hf://datasets/a/b@v1/x/y.parquet") == HubAddress("a/b", "v1", "x/y.parquet")
    assert hub_address("s3://a/b") is None


def test_a_spec_without_addresses_stays_as_it_is() -> None:
    spec = spec_of()

    assert not has_addresses(spec)
    assert localized(spec, "/data") == (spec, [])


def test_folders_stand_in_place_of_addresses() -> None:
    model = {"actor": {"path": "hf://Qwen/Qwen3-8B@v1"}, "critic": {"path": "s3://bucket/critics/small"}}
    files = {"paths": ["/data/own.parquet", "hf://datasets/openai/gsm8k/main/train.parquet"]}
    spec = spec_of(model, {"files": files})

    local, sources = localized(spec, "/data")

    found = paths(local)
    assert found["model.actor.path"] == "/data/sources/hf/models/Qwen/Qwen3-8B/v1"
    assert PurePosixPath(found["model.critic.path"]).parent == PurePosixPath("/data/sources/s3/bucket")
    assert found["data.train.files.paths[0]"] == "/data/own.parquet"
    file = PurePosixPath(found["data.train.files.paths[1]"])
    assert file.name == "train.parquet"
    assert file.parent.parent == PurePosixPath("/data/sources/hf/files/openai/gsm8k/main")
    assert [source.fields for source in sources] == [
        ["model.actor.path"],
        ["model.critic.path"],
        ["data.train.files.paths[1]"],
    ]
    assert [source.path for source in sources] == [found[source.fields[0]] for source in sources]
    assert has_addresses(spec)
    assert not has_addresses(local)


def test_the_same_model_is_fetched_once_for_all_its_roles() -> None:
    same = "hf://Qwen/Qwen3-8B"

    _, [source] = localized(spec_of({"actor": {"path": same}, "ref": {"path": same}}), "/data")

    assert source.fields == ["model.actor.path", "model.ref.path"]


def test_a_model_with_its_code_has_a_separate_folder() -> None:
    model = {"actor": {"path": "hf://a/b", "trustRemoteCode": True}, "critic": {"path": "hf://a/b"}}

    _, sources = localized(spec_of(model), "/data")

    assert [(source.with_code, source.folder) for source in sources] == [
        (True, "/data/sources/hf/models-with-code/a/b/main"),
        (False, "/data/sources/hf/models/a/b/main"),
    ]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_no_folder_lies_in_another(scheme: str) -> None:
    critic = {"path": f"{scheme}://bucket/models/small"}
    _, [inner, outer] = localized(spec_of({"actor": {"path": f"{scheme}://bucket/models"}, "critic": critic}), "/d")

    assert PurePosixPath(inner.folder).parent == PurePosixPath(outer.folder).parent
    assert inner.folder != outer.folder


def test_job_json_says_what_is_fetched_and_reads_back() -> None:
    local, sources = localized(spec_of({"actor": {"path": "hf://a/b"}}), "/data")
    job = JobFile(namespace="a", name="b", uid="u", root="/data/x", spec=local, sources=sources)

    assert JobFile.decode(job.encode(), reader="1") == job
    assert json.loads(job.encode())["sources"][0]["address"] == "hf://a/b"


def test_job_json_of_a_job_without_addresses_is_as_before() -> None:
    job = JobFile(namespace="a", name="b", uid="u", root="/data/x", spec=spec_of())

    assert "sources" not in json.loads(job.encode())
