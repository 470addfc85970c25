"""An engine on a GPU is lost, in the middle of a push or of a generation: the attempt continues with the other one.

Whole runs: with the actor's weights over NCCL to two engines of another pool, and over CUDA IPC to an engine on the
actor's GPU. The seconds from the loss to the end of the next step are printed: run it with -s or -rA.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.main import groups as groups_module
from tests.gpu.losses_in_pushes import LOST_STEP, LosesItsProcessInPush, LosesVllmInPush, Loss, PausingActor
from tests.gpu.whole_runs import NUM_STEPS, PHASE_LIMIT_S, ROLLOUT, lossy_spec, seconds_to_next_step, write_inputs
from tests.integration.trainer import lost_engines
from tests.integration.trainer.lost_engines import LOST_POOL, LosesItsProcess, LosesVllm
from tests.integration.trainer.runs import Run, finish

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LINK_LIMIT_S = 0.75 * PHASE_LIMIT_S
"""The actor's: an end of a link that nobody breaks off waits so long for the other end."""
TRAINED = {"actor": "train", "critic": "train", "ref": ["train"], "reward": ["train"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.gpu(3)
@pytest.mark.parametrize("replica", [LosesVllmInPush, LosesItsProcessInPush])
def test_the_other_engine_of_a_pool_gets_the_weights_over_nccl(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replica: type[Any],
) -> None:
    spec = lossy_spec(model, {"train": 1, "rollout": 2}, {**TRAINED, "rollout": ["rollout"]})
    with caplog.at_level(logging.WARNING):
        run_with_a_loss(tmp_path, spec, replica, monkeypatch)

    assert_continued(tmp_path, caplog.text, "rollout rank 1")
    assert_read_back(tmp_path)


@pytest.mark.gpu(2)
def test_an_engine_of_another_pool_gets_the_weights_when_the_one_on_the_actors_gpu_is_lost(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The last pool loses its engine.
    spec = lossy_spec(model, {"train": 1, "rollout": 1}, {**TRAINED, "rollout": ["rollout", "train"]})
    with caplog.at_level(logging.WARNING):
        run_with_a_loss(tmp_path, spec, LosesVllmInPush, monkeypatch)

    assert_continued(tmp_path, caplog.text, "rollout_train rank 0")
    assert_read_back(tmp_path)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("replica", [LosesVllm, LosesItsProcess])
def test_the_other_engine_generates_what_one_had_not_finished(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replica: type[Any],
) -> None:
    placement = {"actor": "actor", "critic": "critic", "ref": ["critic"], "reward": ["critic"]}
    # So few that each engine reports several parts of its responses, and the queue is longer than what both take.
    rollout = {**ROLLOUT, "maxNumSeqs": 2}
    pools = {"actor": 1, LOST_POOL: 1}
    spec = lossy_spec(model, pools, {**placement, "rollout": ["actor", LOST_POOL]}, rollout=rollout)
    monkeypatch.setattr(groups_module, "RolloutWorker", replica)
    with caplog.at_level(logging.WARNING):
        records = finish(tmp_path, spec).records

    (marker,) = tmp_path.rglob("an-engine-is-lost")
    lost = [step >= lost_engines.LOST_STEP for step in range(1, NUM_STEPS + 1)]
    print(f"{seconds_to_next_step(tmp_path, marker.stat().st_mtime):.1f} s from the loss to the end of the step")
    print(f"seconds of each generation: {[round(record['timing_s/gen'], 1) for record in records.values()]}")
    assert f"rollout_{LOST_POOL} rank 0" in caplog.text
    assert list(records) == list(range(1, NUM_STEPS + 1))
    assert [record["rollout/lost_engines"] for record in records.values()] == lost
    repeated = [record["rollout/repeated_samples"] > 0 for record in records.values()]
    assert repeated == [step == lost_engines.LOST_STEP for step in range(1, NUM_STEPS + 1)]


def run_with_a_loss(root: Path, spec: Mapping[str, Any], replica: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a job to its end in one attempt."""
    monkeypatch.setattr(groups_module, "ActorWorker", PausingActor)
    monkeypatch.setattr(groups_module, "RolloutWorker", replica)
    finish(root, dict(spec))


def assert_continued(root: Path, log: str, lost: str) -> None:
    """Check a run that has lost an engine: the loss itself, what followed, and that nothing is left of it."""
    loss, records = Loss.read(root), Run(root).records
    seconds = records[LOST_STEP]["timing_s/update_weights"]
    differences = [record["training/rollout_probs_diff_mean"] for record in records.values()]
    print(f"{seconds_to_next_step(root, loss.at):.1f} s from the loss to the end of the next step")
    print(f"{seconds:.1f} s for both pushes of the step; mean differences of probabilities {differences}")
    assert lost in log
    assert "the weights are sent again, without the engines that were lost meanwhile" in log
    assert seconds < LINK_LIMIT_S, "an end of the link has waited for its limit"
    assert list(records) == list(range(1, NUM_STEPS + 1))
    assert [record["rollout/lost_engines"] for record in records.values()] == [0, 0, 1, 1]
    assert [record["rollout/engines"] for record in records.values()] == [2, 2, 1, 1]
    assert [record["rollout/repeated_samples"] for record in records.values()] == [0] * NUM_STEPS
    assert records[LOST_STEP]["comm_receivers/update_weights"] == 1
    assert loss.left() == []


def assert_read_back(root: Path) -> None:
    """Check that the parameters of the remaining engine were compared with the weights of the second push."""
    assert Run(root).records[LOST_STEP]["comm_read_back/update_weights"] == 1
