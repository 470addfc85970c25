"""A rollout engine that is lost in mid-generation ends nothing: the other one repeats its samples, with equal numbers.

Real engines on Ray, one in each of two pools. The queue of samples is longer than what both compute at a time, so the
engines pull.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.main import groups as groups_module
from tests.integration.trainer.lost_engines import LOST_POOL, LOST_STEP, LosesItsProcess, LosesVllm
from tests.integration.trainer.runs import STEPS, TASK, Run, assert_same_steps, assert_same_weights, finish, spec_of

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

OF_ENGINES = ("rollout/lost_engines", "rollout/repeated_samples")
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
        "rollout": {"samplesPerPrompt": 2, "maxNumSeqs": 4},
        "placement": {"actor": "actor", "critic": "critic", "ref": "critic", "rollout": ["actor", LOST_POOL]},
        "checkpoint": {"everySteps": 1, "keep": 1},
    }
    return spec_of(model, **settings | changes)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run whose engines all stay."""
    return finish(tmp_path_factory.mktemp("whole"), with_two_engines(model))


def without_losses(run: Run, tmp_path: Path) -> Run:
    """Return the run with the metrics of lost engines checked by nobody else."""
    lines = [
        {name: value for name, value in record.items() if name not in OF_ENGINES} for record in run.records.values()
    ]
    import json

    tmp_path.mkdir()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(tmp_path)


@pytest.mark.parametrize(
    ("worker", "mode"), [(LosesItsProcess, "Overlapped"), (LosesVllm, "Serial"), (LosesItsProcess, "Serial")]
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

    lost = [found.records[step]["rollout/lost_engines"] for step in range(1, STEPS + 1)]
    repeated = [found.records[step]["rollout/repeated_samples"] for step in range(1, STEPS + 1)]
    assert lost == [0, *[1] * (STEPS - LOST_STEP + 1)]
    assert [number > 0 for number in repeated] == [step == LOST_STEP for step in range(1, STEPS + 1)]
    assert f"rollout_{LOST_POOL} rank 0" in caplog.text
    assert_same_steps(
        without_losses(found, tmp_path / "a"), without_losses(whole, tmp_path / "b"), rel=2e-2, absolute=2e-3
    )
    assert_same_weights(found, whole, model)
