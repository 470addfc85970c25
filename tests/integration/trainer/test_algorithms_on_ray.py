"""The example's own functions, dynamic sampling and the penalty of length, through the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_trainer.main import JobFailedError
from ppojob_trainer.telemetry.trace import read_trace
from tests.integration.trainer.runs import (
    ALONE,
    SAME_MODEL,
    Run,
    assert_same_steps,
    assert_same_weights,
    finish,
    spec_of,
)

pytestmark = pytest.mark.timeout(1800)

EXAMPLE = Path("examples/12-own-algorithm")
APART: dict[str, Any] = {
    "pools": [{"name": "trainer", "gpusPerNode": 1}, {"name": "rollout", "gpusPerNode": 1}],
    "placement": {"actor": "trainer", "rollout": ["rollout"]},
}


def own(model: Path, /, **changes: Any) -> dict[str, Any]:
    """Return a job with the example's algorithm, dynamic sampling and a penalty of length."""
    algorithm = yaml.safe_load((EXAMPLE / "ppojob.yaml").read_text())["spec"]["algorithm"]
    for block in ("advantageFunction", "policyLossFunction"):
        algorithm[block]["path"] = str((EXAMPLE / "algorithm.py").absolute())
    reward = {"function": {"path": str(Path(__file__).with_name("is_even.py"))}, "overlongPenalty": {"buffer": 8}}
    return spec_of(
        model,
        **{
            "algorithm": {**algorithm, "dynamicSampling": {}},
            "reward": reward,
            "rollout": {**ALONE, "samplesPerPrompt": 2},
            "actor": {"learningRate": 1e-3, "miniBatchSize": 4},
            "trainer": {"totalSteps": 2, "validateEverySteps": 0},
            "schedule": {"mode": "Serial"},
            **APART,
            **changes,
        },
    )


def phases_of(root: Path, step: int) -> dict[str, list[tuple[float, float]]]:
    """Return start and end of each phase of a step, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for span in read_trace(root / "trace.json"):
        if span.step == step:
            found.setdefault(span.name, []).append((span.start, span.end))
    return found


@pytest.fixture(scope="module")
def serial(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finish(tmp_path_factory.mktemp("serial"), own(model))


def test_the_examples_functions_train_the_policy(serial: Run) -> None:
    for step in (1, 2):
        record = serial.records[step]
        # On the first of two minibatches the policy is the old one, and every weight is 1.
        assert 0.4 < record["actor/fade_weight"] < 1
        assert record["actor/pg_loss"] != 0
        assert record["actor/grad_norm"] > 0
        assert "actor/pg_clipfrac" not in record
        # The median of two is the lower one.
        assert record["critic/advantages/min"] == 0
        assert 0 < record["reward/overlong_penalty/mean"] <= 1
        shaped = record["critic/score/mean"] - record["reward/overlong_penalty/mean"]
        assert record["critic/rewards/mean"] == pytest.approx(shaped, abs=1e-5)
        assert record["training/rollout_probs_diff_mean"] < SAME_MODEL


def test_dynamic_sampling_leaves_only_prompts_whose_scores_differ(serial: Run) -> None:
    for step in (1, 2):
        record = serial.records[step]
        assert record["critic/score/mean"] == 0.5, "one of the two responses to each prompt"
        assert record["sampling/prompts"] > 8
        assert record["sampling/kept_share"] == 8 / record["sampling/prompts"]


@pytest.mark.long
def test_overlapped_fills_the_batch_while_it_generates_and_gives_the_same_numbers(
    serial: Run, model: Path, tmp_path: Path
) -> None:
    overlapped = finish(tmp_path, own(model, schedule={"mode": "Overlapped"}))

    spans = phases_of(tmp_path, step=1)
    assert len(spans["gen"]) == 1, "no engine waits for the end of a round"
    assert len(spans["reward"]) > 1
    assert min(end for _, end in spans["reward"]) < spans["gen"][0][1], "scored while others are generated"
    assert_same_steps(overlapped, serial, rel=2e-2, absolute=2e-3)
    assert_same_weights(overlapped, serial, model)


@pytest.mark.long
def test_a_reward_that_never_differs_ends_the_run_by_name(model: Path, tmp_path: Path) -> None:
    constant = tmp_path / "constant.py"
    constant.write_text("def compute_score(**_):\n    return 1.0\n")
    algorithm = {"advantageEstimator": "GRPO", "dynamicSampling": {"maxGenerationBatches": 2}}
    raw = own(model, algorithm=algorithm, reward={"function": {"path": str(constant)}})

    with pytest.raises(JobFailedError, match="after 2 batches of prompts") as failed:
        finish(tmp_path, raw)

    assert (failed.value.record.reason, failed.value.record.kind) == ("BatchNotFilled", FailureKind.PERMANENT)


@pytest.mark.long
def test_a_wrong_function_ends_the_run_before_models_are_loaded(model: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def compute_advantages(inputs):\n    return inputs.rewards.sum(dim=1)\n")
    algorithm = {"advantageEstimator": "Function", "advantageFunction": {"path": str(wrong)}}

    with pytest.raises(JobFailedError, match=r"advantages is a tensor of shape \[4\]") as failed:
        finish(tmp_path, own(model, algorithm=algorithm))

    assert failed.value.record.reason == "AlgorithmFunctionFailed"
    assert not (tmp_path / "metrics.jsonl").exists()
