"""Saved by one rank, resumed by two, saved by two in the background, resumed by one: the same numbers everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines import two_ranks, two_ranks_resume

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[4]
LIMIT_SECONDS = 540


@pytest.fixture(scope="module")
def out(parallel: ParallelMesh, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `one` of one rank, after an update of both models."""
    folder, batch = tmp_path_factory.mktemp("resume"), two_ranks.whole_batch()
    policy, critic = two_ranks.make_policy(parallel, model_path), two_ranks.make_critic(parallel, model_path)
    policy.update(batch)
    critic.update(batch)
    policy.save(folder / "one" / "actor")
    critic.save(folder / "one" / "critic")
    return folder


@pytest.fixture(scope="module")
def of_one(out: Path, parallel: ParallelMesh, model_path: Path) -> dict[str, Any]:
    seen = two_ranks_resume.go_on(parallel, model_path, two_ranks.whole_batch(), out)
    return seen | {"second": seen["policy"].update(two_ranks.whole_batch())}


@pytest.fixture(scope="module")
def of_two(out: Path, model_path: Path) -> list[dict[str, Any]]:
    store = listen("127.0.0.1", LIMIT_SECONDS)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", two_ranks_resume.__name__, str(rank), str(store.port), str(model_path), str(out)],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(two_ranks.WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=LIMIT_SECONDS)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(60)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [torch.load(out / f"rank-{rank}.pt") for rank in range(two_ranks.WORLD_SIZE)]


def test_two_ranks_resume_from_one_as_one_does(of_two: list[dict[str, Any]], of_one: dict[str, Any]) -> None:
    assert of_two[0]["first"] == of_two[1]["first"]
    assert of_two[0]["first"] == pytest.approx(of_one["first"], rel=1e-4, abs=1e-5)
    assert of_two[0]["second"] == pytest.approx(of_one["second"], rel=1e-3, abs=1e-4)


def test_one_resumes_from_what_two_saved_while_they_trained(
    out: Path, of_two: list[dict[str, Any]], parallel: ParallelMesh, model_path: Path
) -> None:
    policy = two_ranks.make_policy(parallel, model_path)
    policy.restore(out / "background")
    # The update after the save began is not in it, so it comes out the same again.
    assert policy.update(two_ranks.whole_batch()) == pytest.approx(of_two[0]["second"], rel=1e-4, abs=1e-5)
