"""`kubectl ppo model`, with a kubectl that runs the pod's commands in a real shell on a real folder."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ppojob_trainer.kubectl import app, model_files
from tests.unit.trainer.kubectl import pod_commands
from tests.unit.trainer.kubectl.conftest import FINISHED, HEAD, job

Plugin = Callable[..., Result]

FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": os.urandom(2_500_000),
    "model-00002-of-00002.safetensors": os.urandom(300_001),
    "adapter/adapter config.json": b"{'a': 1}",
    "empty": b"",
}
SAVED = {"step": 8, "path": "/data/ppojob/team/products/checkpoints/step-8", "time": "2026-01-31T13:00:00Z"}


class Pod:
    """The storage as the job's pods see it, and the kubectl that reaches them."""

    def __init__(self, folder: Path, mount: Path) -> None:
        self.folder = folder
        self.root = mount / "ppojob" / "team" / "products"
        self.mount = mount
        self.show({"model": {"path": str(self.root / "model")}})

    def show(self, status: dict[str, Any], **checkpoint: Any) -> None:
        """Set the job's status and a section of its spec."""
        found = job(**status)
        found["spec"] |= {"checkpoint": checkpoint}
        found["spec"]["storage"]["mountPath"] = str(self.mount)
        (self.folder / "jobs.json").write_text(json.dumps(found))

    def export(self, name: str = "model", files: dict[str, bytes] = FILES) -> None:
        for file, content in files.items():
            path = self.root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def fault(self, name: str, content: str = "") -> None:
        (self.folder / name).write_text(content)

    @property
    def commands(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    folder, mount = tmp_path / "kubectl", tmp_path / "mount point"
    folder.mkdir()
    program = folder / "kubectl"
    words = map(shlex.quote, [sys.executable, str(pod_commands.__file__), str(folder)])
    program.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    program.chmod(0o755)
    (folder / "pods.json").write_text(json.dumps({"items": [HEAD]}))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(model_files, "_PAUSE_SECONDS", 0.0)
    # Several parts for each of the large files.
    monkeypatch.setattr(model_files, "PART_BYTES", 1_000_000)
    return Pod(folder, mount)


@pytest.fixture
def ppo() -> Plugin:
    return lambda *arguments: CliRunner().invoke(app.app, [str(argument) for argument in arguments])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_nothing_is_left(target: Path) -> None:
    assert not target.exists() or not any(target.iterdir())
    assert [path.name for path in target.parent.iterdir() if path.name.startswith(f".{target.name}")] == []


def test_the_whole_folder_arrives_and_the_command_that_serves_it_is_printed(
    pod: Pod, ppo: Plugin, tmp_path: Path
) -> None:
    pod.export()
    target = tmp_path / "new" / "my model"

    result = ppo("model", "products", "-o", target)

    assert result.exit_code == 0, result.output
    assert content(target) == FILES
    total = sum(map(len, FILES.values()))
    first, second = result.stdout.splitlines()
    assert first == f"{target}: {total:,} bytes, from {pod.root / 'model'}"
    assert shlex.split(second) == ["vllm", "serve", str(target)]
    assert {command.partition(" ")[0] for command in pod.commands} == {"get", "exec"}, "nothing is created"


def test_after_the_end_a_pod_reads_the_claim_for_as_long_as_a_large_model_takes(
    pod: Pod, ppo: Plugin, tmp_path: Path
) -> None:
    pod.export()
    (pod.folder / "pods.json").write_text('{"items": []}')

    assert ppo("model", "products", "-o", tmp_path / "out").exit_code == 0

    created = json.loads((pod.folder / "created.json").read_text())
    assert created["spec"]["activeDeadlineSeconds"] == 8 * 3600
    assert created["spec"]["containers"][0]["command"] == ["sleep", str(8 * 3600)]
    assert pod.commands[-1] == f"delete pod {created['metadata']['name']}"


@pytest.mark.parametrize("cut", ["1000", "1000 fail", "0", "0 fail"])
def test_a_connection_that_is_cut_is_made_again(pod: Pod, ppo: Plugin, tmp_path: Path, cut: str) -> None:
    pod.export()
    pod.fault("cut", cut)
    target = tmp_path / "out"

    result = ppo("model", "products", "-o", target)

    assert result.exit_code == 0, result.output
    assert content(target) == FILES
    assert not (pod.folder / "cut").exists()


def test_bytes_that_changed_on_the_way_are_copied_again(pod: Pod, ppo: Plugin, tmp_path: Path) -> None:
    pod.export()
    pod.fault("garble")

    assert ppo("model", "products", "-o", tmp_path / "out").exit_code == 0

    assert content(tmp_path / "out") == FILES
    assert not (pod.folder / "garble").exists()


def test_a_file_that_became_shorter_is_not_taken_for_whole(
    pod: Pod, ppo: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.export()
    monkeypatch.setattr(model_files.RunFolder, "sizes", lambda self, folder: {"config.json": 10})

    result = ppo("model", "products", "-o", tmp_path / "out")

    assert "config.json cannot be copied: 2 of 10 bytes from 0 on arrived" in result.stderr
    assert_nothing_is_left(tmp_path / "out")


def test_a_transfer_that_cannot_be_done_leaves_nothing(
    pod: Pod, ppo: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.export()
    monkeypatch.setattr(model_files, "_TRIES", 1)
    pod.fault("cut", "1000 fail")
    target = tmp_path / "out"

    result = ppo("model", "products", "-o", target)

    assert result.exit_code == 1
    assert f"{pod.root}/model/" in result.stderr
    assert "connection lost; no files were kept here. Run the command again" in result.stderr
    assert_nothing_is_left(target)


def test_an_interrupted_transfer_leaves_nothing(
    pod: Pod, ppo: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.export()

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_files, "_copy_part", interrupt)
    target = tmp_path / "out"
    target.mkdir()

    assert ppo("model", "products", "-o", target).exit_code == 130

    assert_nothing_is_left(target)


def test_an_empty_folder_is_filled(pod: Pod, ppo: Plugin, tmp_path: Path) -> None:
    pod.export()
    (tmp_path / "out").mkdir()

    assert ppo("model", "products", "-o", tmp_path / "out").exit_code == 0

    assert content(tmp_path / "out") == FILES


def test_a_folder_that_has_something_is_refused_before_the_cluster_is_asked(
    pod: Pod, ppo: Plugin, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("mine")

    result = ppo("model", "products", "-o", target)

    assert (result.exit_code, result.stderr) == (
        1,
        f"error: -o {target} is not empty: use a new folder, or delete this one first\n",
    )
    assert content(target) == {"mine": b"mine"}
    assert not (pod.folder / "log").exists()


def test_a_file_is_no_folder(pod: Pod, ppo: Plugin, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")

    assert (
        ppo("model", "products", "-o", tmp_path / "out").stderr
        == f"error: -o {tmp_path}/out is not a folder: use a new folder\n"
    )


def test_the_newest_of_several_exports_is_the_default_and_a_step_names_another(
    pod: Pod, ppo: Plugin, tmp_path: Path
) -> None:
    for step in (8, 16):
        pod.export(f"models/step-{step}", {"config.json": f"{step}".encode()})
    pod.show({"model": {"path": str(pod.root / "models" / "step-16")}}, export="Each")

    assert ppo("model", "products", "-o", tmp_path / "newest").exit_code == 0
    assert ppo("model", "products", "-o", tmp_path / "older", "--step", "8").exit_code == 0
    missing = ppo("model", "products", "-o", tmp_path / "missing", "--step", "4")

    assert content(tmp_path / "newest") == {"config.json": b"16"}
    assert content(tmp_path / "older") == {"config.json": b"8"}
    assert missing.stderr == (
        f"error: {pod.root}/models/step-4 does not exist: "
        "the exports are of steps 8, 16 (checkpoint.keep limits them)\n"
    )
    assert not (tmp_path / "missing").exists()


def test_a_step_of_a_job_with_one_export_is_refused(pod: Pod, ppo: Plugin, tmp_path: Path) -> None:
    result = ppo("model", "products", "-o", tmp_path / "out", "--step", "8")

    assert "has one exported model" in result.stderr
    assert "omit --step, which is for jobs with spec.checkpoint.export: Each" in result.stderr


@pytest.mark.parametrize(
    ("status", "checkpoint", "words"),
    [
        (
            {"checkpoint": SAVED, "conditions": [FINISHED]},
            {"export": "Never"},
            f"spec.checkpoint.export is Never; create another job with checkpoint.resumeFrom: {SAVED['path']} and "
            "checkpoint.export: Final",
        ),
        (
            {"progress": {"step": 3, "totalSteps": 10}},
            {},
            "3 of 10 steps are done, and spec.checkpoint.export is Final: it is exported after the last step",
        ),
        (
            {"progress": {"step": 3, "totalSteps": 10}},
            {"export": "Each"},
            "3 of 10 steps are done, and spec.checkpoint.export is Each: it is exported with the first checkpoint",
        ),
        (
            {"conditions": [{**FINISHED, "type": "Failed", "reason": "DataUnreadable"}]},
            {},
            "it has failed (DataUnreadable) before it was exported; there is no checkpoint to export from, either",
        ),
    ],
    ids=["never", "running", "each", "failed"],
)
def test_a_job_without_an_export_says_why(
    pod: Pod, ppo: Plugin, tmp_path: Path, status: dict[str, Any], checkpoint: dict[str, Any], words: str
) -> None:
    pod.show(status, **checkpoint)

    result = ppo("model", "products", "-o", tmp_path / "out")

    assert (result.exit_code, result.stderr) == (1, f"error: team/products has no exported model: {words}\n")


def test_a_folder_that_is_gone_is_named(pod: Pod, ppo: Plugin, tmp_path: Path) -> None:
    result = ppo("model", "products", "-o", tmp_path / "out")

    assert result.stderr == (
        f"error: {pod.root}/model does not exist: it was deleted, or is being replaced; run the command again\n"
    )


def test_a_name_outside_of_the_folder_is_refused(
    pod: Pod, ppo: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files.RunFolder, "sizes", lambda self, folder: {"config.json": 1, "../../evil": 1})

    result = ppo("model", "products", "-o", tmp_path / "out")

    assert "lists '../../evil', which is outside of" in result.stderr
    assert_nothing_is_left(tmp_path / "out")


def test_a_disk_that_is_too_small_is_refused(
    pod: Pod, ppo: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files.RunFolder, "sizes", lambda self, folder: {"config.json": 2**62})

    assert "use another disk" in ppo("model", "products", "-o", tmp_path / "out").stderr


def test_a_kubectl_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ppojob_trainer.kubectl import client

    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho begun\nexec sleep 3600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pieces: list[bytes] = []

    def into(piece: bytes) -> None:
        pieces.append(piece)
        # Only now: the program itself may start late.
        monkeypatch.setattr(client, "_LIMIT_SECONDS", 1)

    with pytest.raises(client.KubectlError, match=r"did not answer within 1 s"):
        client.Kubectl().stream("exec", into=into)

    assert b"".join(pieces) == b"begun\n"
    assert subprocess.run(["pgrep", "-P", str(os.getpid()), "sleep"], check=False).returncode == 1
