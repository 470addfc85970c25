"""Checkpoints on a real S3 server: two ranks write, are killed inside a save, one goes on; and so does a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import BucketRefusedError, CheckpointUnreadableError, FencedOutError, open_store
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from tests.integration.trainer import bucket_ranks
from tests.integration.trainer.runs import (
    STEPS,
    Run,
    assert_same_steps,
    checkpointed_spec,
    kill,
    log_of,
    started,
    wait_until,
)
from tests.integration.trainer.s3_server import S3Server
from tests.unit.trainer.engines import two_ranks
from tests.unit.trainer.engines.tiny_llama import save_tiny_model

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow, pytest.mark.usefixtures("s3_environment")]

PROJECT = Path(__file__).resolve().parents[3]
LIMIT_S = 700.0


@pytest.fixture
def parallel() -> Iterator[ParallelMesh]:
    found = init_process_group(Device.CPU, 0, ParallelDims(), listen("127.0.0.1", 60), 60)
    yield found
    found.destroy()


def until(is_so: Callable[[], bool], ranks: list[subprocess.Popen[bytes]], out: Path) -> None:
    deadline = time.monotonic() + bucket_ranks.LIMIT_S
    while not is_so():
        logs = [(out / f"{rank}.log").read_text() for rank in range(len(ranks))]
        assert all(rank.poll() is None for rank in ranks), logs
        assert time.monotonic() < deadline, logs
        time.sleep(0.02)


def test_one_rank_resumes_from_what_two_saved_before_they_were_killed_inside_a_save(
    server: S3Server, parallel: ParallelMesh, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model")
    store = open_store("s3://bucket/ranks", uid="u", attempt=0)
    store.claim()
    ranks_meet = listen("127.0.0.1", 300)
    arguments = [str(ranks_meet.port), str(model), str(tmp_path), store.begin(1)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(two_ranks.WORLD_SIZE):
            command = [sys.executable, "-m", bucket_ranks.__name__, str(rank), *arguments]
            with (tmp_path / f"{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, cwd=PROJECT, env=environment, stderr=log))
        until(lambda: len(list(tmp_path.glob("saved-*"))) == len(ranks), ranks, tmp_path)
        assert store.commit(1, state={"position": 1}, keep=1).location == "s3://bucket/ranks/step-1.attempt-0"
        (tmp_path / "aside").write_text(store.begin(2))
        (tmp_path / "aside").rename(tmp_path / "second")
        half = "ranks/step-2.attempt-0/actor"
        until(lambda: {"__0_0_0.distcp", "__1_0_0.distcp"} <= set(server.keys(half)), ranks, tmp_path)
    finally:
        for process in ranks:
            process.kill()
            process.wait(60)
    assert ".metadata" not in server.keys(half)

    later = open_store("s3://bucket/ranks", uid="u", attempt=1)
    later.claim()
    found = later.resume_point(ResumePolicy.AUTO, None)

    assert found is not None
    assert (found.step, found.state) == (1, {"position": 1})
    policy, critic = two_ranks.make_policy(parallel, model), two_ranks.make_critic(parallel, model)
    policy.restore(f"{found.location}/actor")
    critic.restore(f"{found.location}/critic")
    seen = {**policy.update(two_ranks.whole_batch()), **critic.update(two_ranks.whole_batch())}
    assert seen == pytest.approx(torch.load(tmp_path / "rank-0.pt"), rel=1e-4, abs=1e-5)
    with pytest.raises(FencedOutError):
        store.begin(3)
    policy.save(f"{later.begin(2)}/actor")
    later.commit(2, state={}, keep=1)
    names = {key.partition("/")[0] for key in server.keys("ranks")}
    assert names == {"tracker.json", "step-2.attempt-1"}, "what was cut off, and what is older, is gone"


def test_a_bucket_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(BucketRefusedError, match=r"s3://none/job cannot be used: there is no such bucket .*create it"):
        open_store("s3://none/job", uid="u", attempt=0).claim()


def test_a_checkpoint_that_is_not_there_is_refused_by_name() -> None:
    store = open_store("s3://bucket/new", uid="u", attempt=0)
    store.claim()
    with pytest.raises(CheckpointUnreadableError, match="there is nothing below this address"):
        store.resume_point(ResumePolicy.AUTO, "s3://bucket/none/step-4.attempt-0")


@pytest.mark.long
def test_a_run_killed_inside_a_save_has_the_metrics_of_one_that_was_not(
    server: S3Server, undisturbed: Run, model: Path, tmp_path: Path
) -> None:
    spec = checkpointed_spec(model, path="s3://bucket/team/run")
    with started(tmp_path, spec) as run:
        half = "team/run/step-2.attempt-0"
        wait_until(lambda: bool(server.keys(half)), run, "inside the second save", tmp_path, LIMIT_S)
        kill(run)

    with started(tmp_path, spec) as run:
        assert run.wait(LIMIT_S) == 0, log_of(tmp_path)

    assert "attempt 1" in log_of(tmp_path)
    assert "checkpoints  s3://bucket/team/run" in log_of(tmp_path)
    assert "hidden-secret" not in log_of(tmp_path)
    assert_same_steps(Run(tmp_path), undisturbed, rel=1e-4, absolute=1e-6)
    names = {key.partition("/")[0] for key in server.keys("team/run")}
    assert names == {"tracker.json", f"step-{STEPS - 1}.attempt-1", f"step-{STEPS}.attempt-1"}
    assert not (tmp_path / "checkpoints").exists()
