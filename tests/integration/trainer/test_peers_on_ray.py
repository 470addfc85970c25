"""Whole runs on this machine's own Ray: parallel ranks change no number of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.runs import ONE_POOL, SAME_MODEL, comparable, finish, spec_of
from tests.integration.trainer.tiny_mixtures import FAMILIES
from tests.integration.trainer.tiny_model import write_tiny_model

# The engines' own tests compare the gradients of such ranks in every run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

TRAINING = {"learningRate": 1e-3, "miniBatchSize": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


def run(root: Path, model: Path, /, **changes: Any) -> dict[int, dict[str, float]]:
    raw = spec_of(
        model,
        **ONE_POOL,
        trainer={"totalSteps": 2, "validateEverySteps": 0},
        checkpoint={"everySteps": 0, "export": "Never"},
        **changes,
    )
    return finish(root, raw).records


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return run(tmp_path_factory.mktemp("plain"), model)


@pytest.mark.parametrize(
    ("actor", "critic"),
    [
        ({"sequenceParallelSize": 2}, {"tensorParallelSize": 2}),
        ({"pipelineParallelSize": 2}, {"pipelineParallelSize": 2}),
    ],
    ids=["layers", "stages"],
)
def test_parallel_ranks_change_no_number_of_a_run(
    actor: dict[str, int], critic: dict[str, int], model: Path, plain: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    parallel = run(tmp_path, model, actor={**TRAINING, **actor}, critic={**TRAINING, **critic})
    # In the first step the rollout has equal weights.
    first, expected = comparable(parallel[1]), comparable(plain[1])
    assert first.keys() == expected.keys()
    for name, value in first.items():
        assert value == pytest.approx(expected[name], rel=0.05, abs=0.02), name
    assert parallel[2]["training/rollout_probs_diff_mean"] < SAME_MODEL


def test_adapters_of_divided_layers_are_their_own_reference_and_reach_the_rollout(model: Path, tmp_path: Path) -> None:
    lora = {"rank": 8, "targetModules": ["q_proj", "down_proj"]}
    records = run(
        tmp_path,
        model,
        model={"actor": {"path": str(model), "lora": lora}, "critic": {"lora": lora}},
        algorithm={"kl": {"inReward": True}},
        actor={**TRAINING, "learningRate": 1e-2, "tensorParallelSize": 2},
        critic={**TRAINING, "tensorParallelSize": 2},
    )
    assert [records[step]["training/rollout_probs_diff_mean"] < SAME_MODEL for step in (1, 2)] == [True, True]
    # The policy begins as its reference, and moves away from it.
    assert abs(records[1]["actor/reward_kl_penalty"]) < 1e-6
    assert records[2]["actor/reward_kl_penalty"] != 0


def test_divided_experts_change_no_number_of_a_run(tmp_path: Path) -> None:
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    mixture = write_tiny_model(tmp_path / "model", "qwen3_moe", head_dim=32, num_key_value_heads=2, **settings)
    plain, divided = (
        run(tmp_path / name, mixture, actor={**TRAINING, **sizes}, critic={**TRAINING, **sizes})
        for name, sizes in (("plain", {}), ("divided", {"expertParallelSize": 2}))
    )
    first, expected = comparable(divided[1]), comparable(plain[1])
    assert "actor/expert_imbalance/max" in first
    assert first.keys() == expected.keys()
    for name, value in first.items():
        assert value == pytest.approx(expected[name], rel=0.05, abs=0.02), name
    assert divided[2]["training/rollout_probs_diff_mean"] < SAME_MODEL


def test_divided_experts_of_two_stages_reach_the_rollout(tmp_path: Path) -> None:
    mixture = write_tiny_model(tmp_path / "model", "mixtral", **FAMILIES["mixtral"])
    raw = spec_of(
        mixture,
        algorithm={"advantageEstimator": "GRPO"},
        actor={**TRAINING, "pipelineParallelSize": 2, "expertParallelSize": 2},
        rollout={"samplesPerPrompt": 2},
        pools=[{"name": "trainer", "gpusPerNode": 4}, {"name": "rollout", "gpusPerNode": 1}],
        placement={"actor": "trainer", "rollout": ["rollout"]},
        trainer={"totalSteps": 2, "validateEverySteps": 0},
        checkpoint={"everySteps": 0, "export": "Never"},
    )

    records = finish(tmp_path / "run", raw).records

    assert [records[step]["training/rollout_probs_diff_mean"] < SAME_MODEL for step in (1, 2)] == [True, True]
