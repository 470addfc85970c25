"""Mixtures of experts: trainer and rollout compute the same, before and after a push. Real engines, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.separate_process import LIMIT_S, seen_by
from tests.integration.trainer.tiny_mixtures import EXPERTS, FAMILIES
from tests.integration.trainer.tiny_model import write_tiny_model
from tests.integration.trainer.vllm_agreement import FEW, MODULE, MOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

# Both compute in float32, in another order. The mean of the differences between probabilities.
HEALTHY = 1e-4

CHECKED, ALSO = ("qwen3_moe", "deepseek_v3", "gpt_oss"), ("mixtral",)


@pytest.fixture(scope="module", params=[*CHECKED, *(pytest.param(family, marks=pytest.mark.long) for family in ALSO)])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models") / request.param
    model = write_tiny_model(folder, request.param, **EXPERTS, **FAMILIES[request.param])
    return seen_by(MODULE, str(model), "CPU", "gloo", "float32", "replay", limit=LIMIT_S)


def test_log_probs_agree_before_training(seen: dict[str, Any]) -> None:
    assert seen["diff_at_start"] < HEALTHY


def test_equal_weights_change_nothing(seen: dict[str, Any]) -> None:
    assert seen["equal_with_equal_weights"] >= MOST
    assert seen["equal_with_other_weights"] <= FEW


def test_log_probs_follow_the_pushed_experts(seen: dict[str, Any]) -> None:
    assert seen["diff_of_stale_weights"] > 10 * HEALTHY
    assert seen["diff_after_push"] < HEALTHY
    assert seen["weights_version"] == 2


def test_recorded_experts_bring_a_trainer_of_another_precision_closer(seen: dict[str, Any]) -> None:
    """The engine computes in float32, this trainer in bfloat16: where two scores are close, it chooses another one."""
    diffs = seen["replay"]
    assert diffs["replayed"] < 0.75 * diffs["not_replayed"]
    assert diffs["wrongly_replayed"] > 2 * diffs["not_replayed"]


def test_a_response_has_the_same_experts_in_any_order(seen: dict[str, Any]) -> None:
    """Also where vLLM takes the beginning of a prompt from its cache."""
    assert seen["equal_experts_in_any_order"] >= MOST
    assert seen["equal_experts_with_other_seeds"] <= FEW


def test_the_use_of_the_experts_is_reported(seen: dict[str, Any]) -> None:
    metrics = seen["metrics"]
    assert 1 <= metrics["actor/expert_imbalance/mean"] <= metrics["actor/expert_imbalance/max"] <= 4
