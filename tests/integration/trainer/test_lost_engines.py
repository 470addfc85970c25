"""A rollout engine that is lost in mid-generation ends nothing: the other one repeats its samples, with equal numbers.

Real engines on Ray, one in each of two pools. The queue of samples is longer than what both compute at a time, so the
engines pull.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.main import groups as groups_module
from tests.integration.trainer.lost_engines import LOST_POOL, LOST_STEP, LosesIdleVllm, LosesItsProcess, LosesVllm
from tests.integration.trainer.runs import (
    ALONE,
    STEPS,
    TASK,
    Run,
    assert_same_steps,
    assert_same_weights,
    finish,
    spec_of,
)

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

OF_ENGINES = (
    "rollout/elastic_losses",
    "rollout/engines",
    "rollout/lost_engines",
    "rollout/lost_s",
    "rollout/repeated_samples",
    "rollout/repeated_tokens",
)
NUM_ROWS = 24


def with_two_engines(model: Path, **changes: Any) -> dict[str, Any]:
    data = {
        "train": {"reasoningGym": {**TASK, "size": 2 * NUM_ROWS, "seed": 1}},
        "validation": {"reasoningGym": {**TASK, "size": 8, "seed": 2}},
        "trainBatchSize": NUM_ROWS // 2,
        "maxPromptLength": 256,
        "maxResponseLength": 16,
    }
    settings = {
        "data": data,
        "rollout": {**ALONE, "samplesPerPrompt": 2},
        "placement": {"actor": "actor", "critic": "critic", "ref": ["critic"], "rollout": ["actor", LOST_POOL]},
        "checkpoint": {"everySteps": 1, "keep": 1},
    }
    return spec_of(model, **settings | changes)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run whose engines all stay."""
    return finish(tmp_path_factory.mktemp("whole"), with_two_engines(model))


def numbers_of(run: Run, folder: Path) -> Run:
    """Return the run without the metrics that name the loss."""
    folder.mkdir()
    records = [
        {name: value for name, value in record.items() if name not in OF_ENGINES} for record in run.records.values()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Run(folder)


def of_engines(run: Run, name: str) -> list[float]:
    return [run.records[step][name] for step in range(1, STEPS + 1)]


def assert_lost_but_equal(found: Run, whole: Run, folder: Path) -> None:
    assert of_engines(whole, "rollout/lost_engines") == [0] * STEPS
    assert of_engines(found, "rollout/lost_engines")[-1] == 1
    one, two = numbers_of(found, folder / "found"), numbers_of(whole, folder / "whole")
    assert_same_steps(one, two, rel=2e-2, absolute=2e-3)


@pytest.mark.parametrize(
    ("worker", "mode"),
    [
        (LosesItsProcess, "Overlapped"),
        pytest.param(LosesVllm, "Serial", marks=pytest.mark.long),
        pytest.param(LosesItsProcess, "Serial", marks=pytest.mark.long),
    ],
)
def test_the_other_engine_repeats_the_samples_and_no_number_changes(
    model: Path,
    tmp_path: Path,
    whole: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    worker: type[Any],
    mode: str,
) -> None:
    monkeypatch.setattr(groups_module, "RolloutWorker", worker)
    with caplog.at_level(logging.WARNING):
        found = finish(tmp_path / "run", with_two_engines(model, schedule={"mode": mode}))

    assert of_engines(found, "rollout/lost_engines") == [0, *[1] * (STEPS - LOST_STEP + 1)]
    repeated = of_engines(found, "rollout/repeated_samples")
    assert [number > 0 for number in repeated] == [step == LOST_STEP for step in range(1, STEPS + 1)]
    assert f"rollout_{LOST_POOL} rank 0" in caplog.text
    assert_lost_but_equal(found, whole, tmp_path)
    assert_same_weights(found, whole, model)


@pytest.mark.long
def test_an_engine_that_is_lost_while_it_is_idle_is_left_out_of_the_next_push(
    model: Path, tmp_path: Path, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "RolloutWorker", LosesIdleVllm)

    found = finish(tmp_path / "run", with_two_engines(model))

    assert of_engines(found, "rollout/repeated_samples") == [0] * STEPS
    assert_lost_but_equal(found, whole, tmp_path)
    assert_same_weights(found, whole, model)


@pytest.mark.long
def test_responses_that_wait_in_one_step_off_are_not_lost_with_the_process_of_their_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = with_two_engines(
        model,
        # Two pools of nothing but an engine.
        pools=[{"name": name, "gpusPerNode": 1} for name in ("actor", "rollout", LOST_POOL)],
        placement={"actor": "actor", "critic": "actor", "ref": ["actor"], "rollout": ["rollout", LOST_POOL]},
        schedule={"mode": "OneStepOff"},
        algorithm={"rolloutCorrection": {"method": "Truncate"}},
    )
    whole = finish(tmp_path / "whole", off)
    monkeypatch.setattr(groups_module, "RolloutWorker", LosesItsProcess)

    found = finish(tmp_path / "run", off)

    assert sum(of_engines(found, "rollout/repeated_samples")) > 0
    (tmp_path / "numbers").mkdir()
    assert_lost_but_equal(found, whole, tmp_path / "numbers")
    assert_same_weights(found, whole, model, largest=0.05)
