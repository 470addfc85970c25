"""A mixture of experts on one GPU: transformers' numbers, and a vLLM engine that follows pushed experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.gpu.one_gpu import difference_from_transformers, make_batch
from tests.integration.trainer.separate_process import seen_by
from tests.integration.trainer.tiny_model import write_tiny_model
from tests.integration.trainer.vllm_agreement import MODULE
from tests.unit.trainer.engines.fsdp_engines import policy_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LIMIT_SECONDS = 400
VOCABULARY = 257


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 experts of Qwen3-30B-A3B's proportions, 8 for each token."""
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "experts",
        "qwen3_moe",
        hidden_size=256,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )


def test_a_mixture_trains_with_transformers_log_probs(parallel: ParallelMesh, model_path: Path) -> None:
    training = ActorSpec(learning_rate=1e-4, max_tokens_per_gpu=4096)
    actor = ActorModel(path=str(model_path))
    engine = policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=10, dtype=torch.bfloat16)
    batch = make_batch(VOCABULARY)
    # bfloat16 against float32. A router whose experts are nearly equal may choose another one.
    assert difference_from_transformers(engine, model_path, batch) < 0.1
    metrics = engine.update(batch.with_fields(engine.forward(batch).columns))
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/expert_imbalance/mean"] >= 1


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_vllm_follows_the_pushed_experts(model_path: Path) -> None:
    seen = seen_by(MODULE, str(model_path), "CUDA", "cuda_ipc", limit=LIMIT_SECONDS)
    print(json.dumps(seen))
    assert seen["diff_at_start"] < 0.02
    assert seen["diff_of_stale_weights"] > 2 * seen["diff_after_push"]
    assert seen["diff_after_push"] < 0.02
    assert seen["weights_version"] == 2
