"""An image's tag follows from what goes into it, and from nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.cluster.errors import ClusterError
from tools.cluster.images import build
from tools.cluster.images.recipes import OPERATOR, RECIPES, TRAINER, Recipe
from tools.cluster.layout import PROJECT, Layout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what goes into the two images."""
    for recipe in RECIPES.values():
        recipe.copy_context(tmp_path)
    return tmp_path


def test_the_same_files_give_the_same_tag_in_another_clone(project: Path) -> None:
    for recipe in RECIPES.values():
        assert recipe.tag(project) == recipe.tag(PROJECT)


@pytest.mark.parametrize(
    ("path", "changes_operator", "changes_trainer"),
    [
        ("operator/ppojob_operator/added.py", True, False),
        ("trainer_image/ppojob_trainer/added.py", False, True),
        ("operator/ppojob_api/added.py", True, True),
        ("requirements/operator.txt", True, False),
        ("requirements/trainer-cpu.txt", False, True),
        ("trainer_image/Containerfile", False, True),
        ("operator/ppojob_api/__pycache__/spec.cpython-311.pyc", False, False),
        ("docs/guide.md", False, False),
    ],
)
def test_a_tag_changes_with_what_goes_in(
    project: Path, path: str, changes_operator: bool, changes_trainer: bool
) -> None:
    before = OPERATOR.tag(project), TRAINER.tag(project)
    (project / path).parent.mkdir(parents=True, exist_ok=True)
    with (project / path).open("a") as file:
        file.write("changed\n")
    assert (OPERATOR.tag(project) != before[0]) is changes_operator
    assert (TRAINER.tag(project) != before[1]) is changes_trainer


def test_a_missing_input_is_named(project: Path) -> None:
    shutil.rmtree(project / "operator" / "ppojob_operator")
    with pytest.raises(ClusterError, match="operator/ppojob_operator goes into the image ppojob/operator"):
        OPERATOR.tag(project)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_the_containerfile_copies_is_what_the_tag_counts(recipe: Recipe) -> None:
    copied = set()
    for line in (PROJECT / recipe.containerfile).read_text().splitlines():
        if line.startswith("COPY "):
            copied |= set(line.replace("${REQUIREMENTS}", recipe.requirements).split()[1:-1])
    assert copied == {recipe.requirements, *recipe.code}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_image_runs_as_a_numeric_user_that_is_not_root(recipe: Recipe) -> None:
    users = [
        line.split()[1]
        for line in (PROJECT / recipe.containerfile).read_text().splitlines()
        if line.startswith("USER ")
    ]
    assert users[-1].isdigit()
    assert int(users[-1]) > 0


@pytest.mark.parametrize(("words", "is_kept"), [("", False), ("#!/bin/sh", True)])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_remains_of_another_builds_uv_are_not_taken_for_one(
    recipe: Recipe, words: str, is_kept: bool, tmp_path: Path
) -> None:
    lines = recipe.stages(PROJECT)[1].splitlines()
    [guard] = [line.removesuffix("\\") for line in lines if "[ -s /run/uv/uv ]" in line]
    uv = tmp_path / "uv"
    uv.write_text(words)

    subprocess.run(["sh", "-euc", guard.replace("/run/uv", str(tmp_path))], check=True)

    assert uv.exists() is is_kept


def state_of_pull(monkeypatch: pytest.MonkeyPatch, reason: str, message: str) -> str:
    """Return what is said of a pod whose container waits."""
    waiting = {"state": {"waiting": {"reason": reason, "message": message}}}
    pod = {"status": {"phase": "Pending", "containerStatuses": [waiting]}}
    monkeypatch.setattr(build, "get_json", lambda *_: pod)
    return build._unfetched(Layout.from_environment(), "pull-trainer")


def test_a_pull_that_the_kubelet_repeats_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said = state_of_pull(monkeypatch, "ErrImagePull", "context deadline exceeded")

    assert said == "ErrImagePull: context deadline exceeded"


@pytest.mark.parametrize(
    ("reason", "message"),
    [("ErrImagePull", "localhost:5000/t:1: not found"), ("ImagePullBackOff", "not found"), ("InvalidImageName", "")],
)
def test_a_pull_that_cannot_succeed_ends_the_wait(monkeypatch: pytest.MonkeyPatch, reason: str, message: str) -> None:
    with pytest.raises(ClusterError, match=f"pull-trainer cannot start: {reason}"):
        state_of_pull(monkeypatch, reason, message)
