"""Mixtures of experts: trainer and rollout compute the same, before and after a push. Real engines, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.separate_process import LIMIT_S, seen_by
from tests.integration.trainer.tiny_model import write_tiny_model
from tests.integration.trainer.vllm_agreement import FEW, MODULE, MOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

# Both compute in float32, in another order. The mean of the differences between probabilities.
HEALTHY = 1e-4


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 32},
    # vLLM's latent attention on the CPU takes these sizes of the latent vector and of the rotated part alone.
    "deepseek_v3": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "rope_parameters": YARN,
    },
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32, "head_dim": 32},
}


CHECKED, ALSO = ("qwen3_moe", "deepseek_v3"), ("mixtral",)


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
