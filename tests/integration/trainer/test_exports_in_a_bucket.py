"""Exports on a real S3 server: parts, an upload that was cut off, and the one that completes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ppojob_trainer.checkpoints import bucket
from ppojob_trainer.exports import UploadRefusedError, open_target, upload
from ppojob_trainer.exports.target import MANIFEST, Export
from tests.integration.trainer.runs import LIMIT_S, STEPS, Run, log_of, spec_of, started
from tests.integration.trainer.s3_server import S3Server

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow, pytest.mark.usefixtures("s3_environment")]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    folder = tmp_path / "step-8"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    # More than one part.
    (folder / "model.safetensors").write_bytes(os.urandom(2 * bucket._PART_BYTES + 1))
    return Export(folder, 8, "u", has_own_place=True)


def test_a_large_file_arrives_whole_and_the_last_key_completes_the_export(server: S3Server, export: Export) -> None:
    address = "s3://bucket/models/whole"

    open_target(address).check("u")
    assert server.keys("models/whole") == [], "the check leaves nothing"
    assert upload(open_target(address), export, lambda: None) == f"{address}/step-8"

    assert server.keys("models/whole/step-8") == ["config.json", "model.safetensors", MANIFEST]
    stored = server.store.get("models/whole/step-8/model.safetensors").bytes()
    assert bytes(stored) == (export.folder / "model.safetensors").read_bytes()
    manifest = json.loads(bytes(server.store.get(f"models/whole/step-8/{MANIFEST}").bytes()))
    assert manifest["files"]["model.safetensors"] == 2 * bucket._PART_BYTES + 1
    with pytest.raises(UploadRefusedError, match="holds the model of another run"):
        open_target(address).check("another")


def test_an_upload_that_was_cut_off_is_completed_by_the_next(server: S3Server, export: Export) -> None:
    address = "s3://bucket/models/cut"

    def cut() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(open_target(address), export, cut)
    assert server.keys("models/cut/step-8") == ["config.json"]

    upload(open_target(address), export, lambda: None)

    assert server.keys("models/cut/step-8") == ["config.json", "model.safetensors", MANIFEST]


def test_a_bucket_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(
        UploadRefusedError,
        match=r"^checkpoint\.exportTo s3://none/models cannot be used: there is no such bucket .*create it",
    ):
        open_target("s3://none/models").check("u")


@pytest.mark.long
def test_a_run_uploads_each_export_and_its_cards_have_the_metrics(
    server: S3Server, model: Path, tmp_path: Path
) -> None:
    address = "s3://bucket/models/run"
    exporting = {"everySteps": 1, "keep": 2, "export": "Each", "exportTo": address}
    with started(tmp_path, spec_of(model, checkpoint=exporting)) as run:
        assert run.wait(LIMIT_S) == 0, log_of(tmp_path)

    places = {key.partition("/")[0] for key in server.keys("models/run")}
    assert places == {f"step-{step}" for step in range(1, STEPS + 1)}
    kept = {path.name for path in (tmp_path / "models").iterdir()}
    assert kept == {f"step-{step}" for step in (STEPS - 1, STEPS)}
    assert f"the policy is uploaded: {address}/step-{STEPS}" in log_of(tmp_path)
    for step, record in Run(tmp_path).records.items():
        if step > 0:
            names = server.keys(f"models/run/step-{step}")
            assert {"config.json", "model.safetensors", "chat_template.jinja", MANIFEST} <= set(names)
            card = bytes(server.store.get(f"models/run/step-{step}/README.md").bytes()).decode()
            assert f"| last, step {step} | {record['critic/score/mean']:.4g} |" in card
            assert f"| validation at step {step} | value |" in card
