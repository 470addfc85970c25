"""OneStepOff with the real engines on Ray: it learns, and a killed run ends with the numbers of an undisturbed one.

The rollout has a separate pool and generates step N + 1 with the weights after step N - 1, while step N is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.telemetry.trace import Span, read_trace
from tests.integration.trainer.runs import (
    ALONE,
    LIMIT_S,
    TASK,
    Run,
    assert_same_steps,
    assert_same_weights,
    finish,
    kill_unfinished,
    log_of,
    records_of,
    reward_until,
    spec_of,
    started,
    wait_until,
)

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

POOLS = [{"name": "trainer", "gpusPerNode": 1}, {"name": "rollout", "gpusPerNode": 1}]
PLACEMENT = {"actor": "trainer", "rollout": ["rollout"]}
LEARNING_STEPS = 25
MIN_RISE = 0.3
KILLED_AFTER, KILLED_STEPS = 3, 7
"""Responses of the steps 4 to 6 may have their scores when the record of step 3 is written, those of step 7 begin after
the fourth update (with `maxStaleness: 2`). So a run of seven steps cannot end before it is killed."""


def off(model: Path, staleness: int, **changes: Any) -> dict[str, Any]:
    """Return the spec of a job with truncated importance sampling."""
    algorithm = {"rolloutCorrection": {"method": "Truncate"}, **changes.pop("algorithm", {})}
    schedule = {"mode": "OneStepOff", "maxStaleness": staleness, **changes.pop("schedule", {})}
    return spec_of(model, pools=POOLS, placement=PLACEMENT, schedule=schedule, algorithm=algorithm, **changes)


@pytest.mark.long
def test_the_reward_rises_and_every_response_is_one_step_old(model: Path, tmp_path: Path) -> None:
    raw = off(
        model,
        1,
        data={
            "train": {"reasoningGym": {**TASK, "size": 256, "seed": 1}},
            "trainBatchSize": 8,
            "maxPromptLength": 256,
            "maxResponseLength": 16,
        },
        algorithm={"advantageEstimator": "GRPO"},
        rollout={"samplesPerPrompt": 4},
        actor={"learningRate": 2e-3, "miniBatchSize": 2},
        trainer={"totalSteps": LEARNING_STEPS, "validateEverySteps": 0},
        checkpoint={"everySteps": 0, "export": "Never"},
    )

    records = finish(tmp_path, raw).records

    rewards = [records[step]["critic/score/mean"] for step in range(1, LEARNING_STEPS + 1)]
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 > MIN_RISE, rewards
    assert [records[step]["staleness/oldest_version"] for step in (1, 2, 3, 25)] == [0, 0, 1, 23]
    for step in range(3, LEARNING_STEPS + 1):
        record = records[step]
        assert record["staleness/max"] == record["staleness/mean"] == 1
        assert 0 < record["rollout_corr/rollout_is_mean"] <= 2
        assert 0 < record["rollout_corr/rollout_is_eff_sample_size"] <= 1.001
        assert record["rollout_corr/k3_kl"] > records[1]["rollout_corr/k3_kl"], "the weights are older"
    trace = read_trace(tmp_path / "trace.json")
    steps = range(3, LEARNING_STEPS)
    # On a busy machine a short generation may end before the update that it runs beside elsewhere.
    assert any(is_beside(trace, "gen", step + 1, "update_actor", step) for step in steps)
    assert not any(is_beside(trace, "gen", step + 1, "update_weights", step) for step in steps)


def test_with_a_bypass_the_ratio_is_that_to_the_engine(model: Path, tmp_path: Path) -> None:
    raw = off(
        model,
        1,
        algorithm={"advantageEstimator": "GRPO", "rolloutCorrection": {"method": "Bypass"}},
        rollout={"samplesPerPrompt": 2},
        # The policy stays the same, so that the ratio shows only what engine and trainer compute.
        actor={"learningRate": 1e-12, "miniBatchSize": 4},
        trainer={"totalSteps": 3, "validateEverySteps": 0},
        checkpoint={"everySteps": 0, "export": "Never"},
    )

    records = finish(tmp_path, raw).records

    for step in (1, 2, 3):
        record = records[step]
        assert "timing_s/old_log_prob" not in record
        assert "training/rollout_probs_diff_mean" not in record
        # The model has contrast: log-probs of other tokens would differ by more than 1 on average.
        assert abs(record["actor/ppo_kl"]) < 0.01
        assert record["actor/pg_clipfrac"] == 0
        assert record["actor/grad_norm"] > 0
    assert not any(span.name == "old_log_prob" for span in read_trace(tmp_path / "trace.json"))


def is_beside(trace: list[Span], one: str, step: int, other: str, step_of_other: int) -> bool:
    """Whether two phases ran at the same time."""
    [mine], [theirs] = (
        [span for span in trace if (span.name, span.step) == wanted] for wanted in ((one, step), (other, step_of_other))
    )
    return mine.start < theirs.end and theirs.start < mine.end


@pytest.mark.long
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_killed_run_has_the_numbers_of_one_that_was_not(model: Path, tmp_path: Path, staleness: int) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    spec = off(
        model,
        staleness,
        rollout=ALONE,
        # With the record of the validation before training.
        reward=reward_until(killed, 1 + KILLED_AFTER),
        checkpoint={"everySteps": 1, "keep": KILLED_STEPS, "async": False},
        trainer={"totalSteps": KILLED_STEPS, "validateEverySteps": 2},
    )
    for root in (killed, whole):
        root.mkdir()
    with started(killed, spec) as run:
        # The record of a step follows its checkpoint.
        wait_until(lambda: len(records_of(killed)) > KILLED_AFTER, run, "the third checkpoint and record", killed)
        kill_unfinished(run, killed)
    manifest = json.loads((killed / "checkpoints" / "step-3" / "manifest.json").read_text())
    assert (
        manifest["state"]["queue"] == {1: {"base": 3, "versions": [2]}, 2: {"base": 2, "versions": [2, 2]}}[staleness]
    )
    assert max(records_of(killed)) < KILLED_STEPS, "the kill came before the end"

    for root in (killed, whole):
        with started(root, spec) as run:
            assert run.wait(LIMIT_S) == 0, log_of(root)

    assert "resuming after step" in log_of(killed)
    assert_same_steps(Run(killed), Run(whole), rel=1e-4, absolute=1e-6)
    assert_same_weights(Run(killed), Run(whole), model)


def test_weights_arrive_while_responses_are_generated_and_a_killed_run_loses_none(model: Path, tmp_path: Path) -> None:
    spec = off(
        model,
        2,
        schedule={"weightUpdates": "InFlight"},
        algorithm={"advantageEstimator": "GRPO"},
        data={
            "train": {"reasoningGym": {**TASK, "size": 64, "seed": 1}},
            "trainBatchSize": 8,
            "maxPromptLength": 256,
            "maxResponseLength": 96,
        },
        # Few sequences at a time: generation takes longer than training, so that pushes meet it.
        rollout={"samplesPerPrompt": 4, "maxNumSeqs": 4},
        actor={"learningRate": 1e-3, "miniBatchSize": 8},
        reward=reward_until(tmp_path, KILLED_AFTER),
        checkpoint={"everySteps": 1, "keep": 2, "async": False, "export": "Never"},
        trainer={"totalSteps": KILLED_STEPS, "validateEverySteps": 0},
    )
    with started(tmp_path, spec) as run:
        wait_until(lambda: len(records_of(tmp_path)) >= KILLED_AFTER, run, "the third record", tmp_path)
        kill_unfinished(run, tmp_path)
    last = max(int(folder.name.removeprefix("step-")) for folder in (tmp_path / "checkpoints").glob("step-*"))
    saved = json.loads((tmp_path / "checkpoints" / f"step-{last}" / "manifest.json").read_text())["state"]["queue"]
    assert saved["base"] == last, "each step pushes"
    assert saved["versions"], "the next step's responses began with older weights"

    with started(tmp_path, spec) as run:
        assert run.wait(LIMIT_S) == 0, log_of(tmp_path)

    assert f"resuming after step {last}" in log_of(tmp_path)
    records = records_of(tmp_path)
    assert sorted(records) == list(range(1, KILLED_STEPS + 1))
    for step, record in records.items():
        assert 0 <= record["staleness/mean"] <= record["staleness/max"] <= 2
        mixed, newer = record["staleness/mixed_samples_fraction"], record["staleness/newer_tokens_fraction"]
        assert 0 <= mixed <= 1
        assert 0 <= newer <= 1
        assert (mixed > 0) == (newer > 0)
        assert 0 < record["rollout_corr/rollout_is_eff_sample_size"] <= 1.001, step
    for step, version in enumerate(saved["versions"], start=last + 1):
        assert version <= records[step]["staleness/oldest_version"] < last, "the saved responses were trained"
    assert any(record["staleness/mixed_samples_fraction"] > 0 for record in records.values())
    assert any(record.get("rollout/paused_s", 0) > 0 for record in records.values())
    trace = read_trace(tmp_path / "trace.json")
    assert is_during(trace, "update_weights", "gen"), "a push met a generation"


def is_during(trace: list[Span], one: str, other: str) -> list[Span]:
    """Return the phases of one name that began and ended while one of another name ran."""
    return [
        mine
        for mine in trace
        for theirs in trace
        if (mine.name, theirs.name) == (one, other) and theirs.start < mine.start and mine.end < theirs.end
    ]
