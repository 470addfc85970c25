"""The exports of a run: where the folders are, which are kept, and what an upload that fails leaves."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from ppojob_api.v1alpha1.resolve import JobFile, Reporting, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.exports import UploadFailedError, UploadRefusedError
from ppojob_trainer.exports.target import MANIFEST
from ppojob_trainer.main import exports as main_exports
from ppojob_trainer.main.exports import JobExports, check_target
from ppojob_trainer.main.failures import JobFailedError
from ppojob_trainer.main.run import run_job
from ppojob_trainer.telemetry import RunFiles
from tests.good_spec import GOOD

ADDRESS = "s3://bucket/models"
REPORTING = Reporting(url="https://operator")


class Actor:
    """The actor's ranks: they write a folder with the number of the call."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def group(self) -> Actor:
        return self

    @property
    def actor(self) -> Actor:
        return self

    async def call(self, method: object, folder: Path) -> None:
        assert not folder.exists()
        self.calls += 1
        folder.mkdir()
        (folder / "config.json").write_text(str(self.calls))


def job_of(root: Path, **checkpoint: Any) -> JobFile:
    spec = parse_spec({**GOOD["spec"], "checkpoint": checkpoint})
    return JobFile(namespace="team", name="products", uid="u", root=str(root), spec=resolve(spec), reporting=REPORTING)


def exports_of(root: Path, *, signs: list[None] | None = None, **checkpoint: Any) -> JobExports:
    on_file = (signs if signs is not None else []).append
    return JobExports(job_of(root, **checkpoint), Actor(), RunFiles(root), 0, lambda: on_file(None))  # type: ignore[arg-type]


async def test_the_last_export_replaces_the_one_before(tmp_path: Path) -> None:
    exports = exports_of(tmp_path)

    for step in (4, 8):
        assert await exports.export(step, 1) == tmp_path / "model"

    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "2"
    assert "for 8 steps" in (tmp_path / "model" / "README.md").read_text()
    assert exports.newest(8) is None, "it is exported again at the end"


async def test_what_an_earlier_attempt_did_not_complete_is_deleted(tmp_path: Path) -> None:
    for attempt in (0, 1, 2):
        (tmp_path / f".model.tmp-{attempt}").mkdir()
        (tmp_path / f".model.tmp-{attempt}" / "model-00001-of-00002.safetensors").touch()
    exports = JobExports(job_of(tmp_path), Actor(), RunFiles(tmp_path), 1, lambda: None)  # type: ignore[arg-type]

    await exports.export(4, 1)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.tmp-2", "model"], "2 may still write"


async def test_each_export_has_its_folder_and_the_newest_are_kept(tmp_path: Path) -> None:
    exports = exports_of(tmp_path, export="Each", exportTo=ADDRESS)

    for step in (4, 8, 100, 12):
        assert await exports.export(step, 2) == tmp_path / "models" / f"step-{step}"

    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["step-12", "step-8"], "100 was abandoned"
    assert [exports.newest(step) for step in (100, 12, 11, 4)] == [12, 12, 8, None]


async def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = exports_of(tmp_path)
    await exports.export(4, 1)

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(main_exports, "complete", fail)
    with pytest.raises(OSError, match="no space left"):
        await exports.export(8, 1)

    assert (tmp_path / "model" / "config.json").read_text() == "1"


async def test_an_export_is_uploaded_and_each_file_is_a_sign_of_life(tmp_path: Path, memory: MemoryStore) -> None:
    signs: list[None] = []
    exports = exports_of(tmp_path, signs=signs, exportTo=ADDRESS)
    await exports.export(8, 1)

    result = await exports.upload(8)

    assert (result.address, result.failure) == (ADDRESS, None)
    await asyncio.sleep(0)
    assert len(signs) == len(["README.md", "config.json"])
    found = {each["path"] for page in obstore.list(memory) for each in page}
    assert found == {"models/README.md", "models/config.json", f"models/{MANIFEST}"}


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (UploadRefusedError("the store refuses"), "UploadRefused", "the store refuses"),
        (UploadFailedError("the store is away"), "UploadFailed", "the store is away"),
        (KeyError("a defect"), "UploadFailed", f"checkpoint.exportTo {ADDRESS}: KeyError: 'a defect'"),
    ],
)
async def test_an_upload_that_fails_is_a_result_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, words: str
) -> None:
    def fail(*arguments: object) -> str:
        raise error

    monkeypatch.setattr(main_exports, "upload", fail)
    monkeypatch.setattr(main_exports, "open_target", lambda address: None)
    exports = exports_of(tmp_path, exportTo=ADDRESS)
    await exports.export(8, 1)

    result = await exports.upload(8)

    assert result.address is None
    assert result.failure is not None
    assert result.failure.reason == reason
    remedy = f"the model is in {tmp_path}/model; copy it with kubectl ppo model products -o DIR"
    assert result.failure.message == f"{words}; {remedy}"
    assert (tmp_path / "model" / "config.json").exists()


async def test_an_upload_that_is_dropped_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(*arguments: object) -> str:
        begun.set()
        go_on.wait(300)
        return ADDRESS

    monkeypatch.setattr(main_exports, "upload", wait)
    monkeypatch.setattr(main_exports, "open_target", lambda address: None)
    # Those of earlier tests have answered, but may not have ended.
    before = set(threading.enumerate())
    task = asyncio.create_task(exports_of(tmp_path, exportTo=ADDRESS).upload(8))
    assert await asyncio.to_thread(begun.wait, 120)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    [thread] = [each for each in threading.enumerate() if each.name == "upload" and each not in before]
    assert thread.daemon
    go_on.set()
    await asyncio.to_thread(thread.join, 120)


def test_a_target_that_refuses_ends_the_attempt_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    job = job_of(tmp_path, exportTo="hf://team/products")

    with pytest.raises(JobFailedError) as failed:
        run_job(job, attempt=0, stop=threading.Event())

    assert failed.value.record.reason == "UploadRefused"
    assert "there is no token; give a token that may write there as HF_TOKEN" in failed.value.record.message


def test_a_target_that_does_not_answer_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        def check(self, uid: str) -> None:
            raise UploadFailedError(f"{ADDRESS} is away")

    monkeypatch.setattr(main_exports, "open_target", lambda address: Silent())

    check_target(job_of(tmp_path, exportTo=ADDRESS))

    assert f"the exports may not be uploaded: {ADDRESS} is away" in caplog.text


def test_a_job_without_a_target_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_exports, "open_target", None)

    check_target(job_of(tmp_path))
