"""Mixtures of experts on one GPU: transformers' numbers, and a vLLM engine that follows pushed experts.

The trainer computes with the experts that it chooses, and with those that the engine recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.fsdp import model
from ppojob_trainer.engines.train.fsdp.layers import prepare_layer
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.gpu.one_gpu import difference_from_transformers, make_batch, rounding_of_transformers
from tests.integration.trainer.separate_process import seen_by
from tests.integration.trainer.tiny_mixtures import EXPERTS, FAMILIES
from tests.integration.trainer.tiny_model import write_tiny_model
from tests.integration.trainer.vllm_agreement import MODULE
from tests.unit.trainer.engines.fsdp_engines import policy_engine

pytestmark = pytest.mark.gpu

LIMIT_SECONDS = 400
VOCABULARY = 257


# Of the proportions of Qwen3-30B-A3B, Mixtral, gpt-oss and DeepSeek-V3.
ON_GPUS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "head_dim": 64},
    "mixtral": {"intermediate_size": 256, "head_dim": 64},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 256, "head_dim": 64},
    "deepseek_v3": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}


@pytest.fixture(scope="module", params=ON_GPUS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = EXPERTS | FAMILIES[family] | SHAPE | ON_GPUS[family]
    return write_tiny_model(tmp_path_factory.mktemp("models") / family, family, **settings)


def test_a_mixture_trains_with_transformers_log_probs(parallel: ParallelMesh, model_path: Path) -> None:
    training = ActorSpec(learning_rate=1e-4, max_tokens_per_gpu=4096)
    actor = ActorModel(path=str(model_path))
    engine = policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=10, dtype=torch.bfloat16)
    batch = make_batch(VOCABULARY)
    # bfloat16 against float32. A router whose experts are nearly equal may choose another one, also in transformers:
    # 0.04 (qwen3_moe, deepseek_v3) and 0.10 (mixtral) there. The log-probs differ by 1.2 or more from their mean.
    assert difference_from_transformers(engine, model_path, batch) < 2 * rounding_of_transformers(model_path, batch)
    metrics = engine.update(batch.with_fields(engine.forward(batch).columns))
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/expert_imbalance/mean"] >= 1


def test_passes_with_and_without_gradients_compute_the_same_bits(
    parallel: ParallelMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled as on ranks that divide the experts, with a hidden size for whose sums Inductor has two kernels."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    measured: list[str] = []
    benchmark = CachingAutotuner.benchmark_all_configs

    def noted(self: Any, *given: Any, **options: Any) -> Any:
        measured.append(self.fn.__name__)
        return benchmark(self, *given, **options)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", noted)
    in_parts: dict[str, Any] = {"gathers_experts": True}
    monkeypatch.setattr(model, "prepare_layer", lambda layer, **options: prepare_layer(layer, **options | in_parts))
    settings = EXPERTS | FAMILIES["gpt_oss"] | SHAPE | ON_GPUS["gpt_oss"] | {"hidden_size": 2880}
    actor = ActorModel(path=str(write_tiny_model(tmp_path / "model", "gpt_oss", **settings)), compile=True)
    torch.compiler.reset()
    with fresh_cache():
        training = ActorSpec(learning_rate=1e-30, max_tokens_per_gpu=4096)
        engine = policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=10, dtype=torch.bfloat16)
        batch = make_batch(VOCABULARY)
        # Products of another size may use another kernel.
        batch.meta_info["num_mini_batches"] = 1
        metrics = engine.update(batch.with_fields(engine.forward(batch).columns))
    assert metrics["training/update_probs_diff_mean"] == 0
    assert measured
    assert not [name for name in measured if "_red_" in name]


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True)
def test_vllm_follows_the_pushed_experts(model_path: Path) -> None:
    assert_follows(seen_by(MODULE, str(model_path), "CUDA", "cuda_ipc", limit=LIMIT_SECONDS))


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_vllm_follows_and_the_trainer_has_its_experts(model_path: Path) -> None:
    seen = seen_by(MODULE, str(model_path), "CUDA", "cuda_ipc", "bfloat16", "replay", limit=LIMIT_SECONDS)
    assert_follows(seen)
    # Both round to bfloat16, so few tokens have other experts without the engine's choices.
    diffs = seen["replay"]
    assert diffs["replayed"] < 0.02
    assert diffs["wrongly_replayed"] > 2 * max(diffs["replayed"], diffs["not_replayed"])


def assert_follows(seen: dict[str, Any]) -> None:
    print(json.dumps(seen))
    assert seen["diff_at_start"] < 0.02
    assert seen["diff_of_stale_weights"] > 2 * seen["diff_after_push"]
    assert seen["diff_after_push"] < 0.02
    assert seen["weights_version"] == 2
