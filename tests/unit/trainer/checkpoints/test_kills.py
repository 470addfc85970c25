"""A SIGKILL at any moment of a save leaves a complete checkpoint, and the next attempt resumes from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import Checkpoint, CheckpointStore
from ppojob_trainer.checkpoints.folder_store import FolderStore


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def _killed_at_each_point(folder: Path, scenario: str) -> list[Path]:
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), str(folder), scenario]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(folder.iterdir(), key=lambda path: int(path.name))


def _resume(folder: Path) -> tuple[CheckpointStore, Checkpoint | None]:
    store = FolderStore(folder, uid="u", attempt=2)
    store.claim()
    return store, store.resume_point(ResumePolicy.AUTO, None)


def _is_whole(found: Checkpoint) -> bool:
    shards = {role: Path(found.location, role, "shard-0").read_text() for role in ("actor", "critic")}
    return shards == {role: f"{role} at {found.step}" for role in shards} and found.state == {"data": found.step}


def _save_and_tidy(store: CheckpointStore) -> None:
    Path(store.begin(8), "shard-0").write_text("x")
    store.commit(8, state={}, keep=1)


def test_after_a_kill_anywhere_the_older_or_the_newer_checkpoint_is_whole(tmp_path: Path) -> None:
    folders = _killed_at_each_point(tmp_path, "second")

    steps = []
    for folder in folders:
        store, found = _resume(folder)
        assert found is not None
        assert _is_whole(found), folder
        steps.append(found.step)
        _save_and_tidy(store)
        assert sorted(path.name for path in folder.iterdir()) == ["owner.json", "step-8", "tracker.json"], folder
    # The order of the deaths is the order of the save: first the older one counts, from one moment on the newer.
    assert steps == sorted(steps)
    assert {4, 8} == set(steps)
    assert len(steps) > 15


@pytest.mark.parametrize("scenario", ["first", "again"])
def test_without_an_older_one_a_kill_begins_afresh_or_leaves_a_whole_one(tmp_path: Path, scenario: str) -> None:
    for folder in _killed_at_each_point(tmp_path, scenario):
        store, found = _resume(folder)
        assert found is None or _is_whole(found), folder
        _save_and_tidy(store)
        assert sorted(path.name for path in folder.iterdir()) == ["owner.json", "step-8", "tracker.json"], folder
