"""A mixture of experts on one GPU: transformers' numbers, and a vLLM engine that follows pushed experts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.network import free_port
from ppojob_trainer.engines.train.mesh import ParallelDims, ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.integration.trainer.tiny_model import write_tiny_model
from tests.integration.trainer.vllm_agreement import agreement
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

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


@pytest.fixture(scope="module")
def parallel() -> Iterator[ParallelMesh]:
    group = init_process_group(Device.CUDA, 0, ParallelDims(), "127.0.0.1", free_port("127.0.0.1"), 60)
    yield group
    group.destroy()


def make_batch() -> DataProto:
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

    tensors = rollout_batch([tokens(20 + row) for row in range(8)], [tokens(30 - row) for row in range(8)])
    mask = tensors[Keys.RESPONSE_MASK]
    tensors[Keys.ADVANTAGES] = mask.unpadded(torch.randn(mask.padded().shape, generator=generator))
    return DataProto.from_dict(
        tensors, meta_info={"temperature": 1.0, "num_mini_batches": 2, "epochs": 1, "response_length": 30}
    )


def test_log_probs_equal_those_of_plain_transformers(parallel: ParallelMesh, model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    batch = make_batch()
    training = ActorSpec(learning_rate=1e-4, max_tokens_per_gpu=4096)
    engine = policy_engine(
        parallel, ActorModel(path=str(model_path)), training, AlgorithmSpec(), total_steps=10, dtype=torch.bfloat16
    )
    computed = engine.forward(batch).padded(Keys.OLD_LOG_PROBS)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**padded_inputs(batch)).logits
    responses, mask = padded_responses(batch), batch.padded(Keys.RESPONSE_MASK)
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]), dim=-1)
    expected = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * mask
    assert expected.std() > 0.5, "the model has no contrast, so equal numbers would show nothing"
    # bfloat16 against float32. A router whose experts are nearly equal may choose another one.
    assert ((computed.cpu() - expected).abs().sum() / mask.sum()) < 0.1
    metrics = engine.update(batch.with_fields(engine.forward(batch).columns))
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/expert_imbalance/mean"] >= 1


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_vllm_follows_the_pushed_experts(model_path: Path) -> None:
    seen = agreement(str(model_path), "CUDA", "cuda_ipc", limit=LIMIT_SECONDS)
    print(json.dumps(seen))
    assert seen["diff_at_start"] < 0.02
    assert seen["diff_of_stale_weights"] > 2 * seen["diff_after_push"]
    assert seen["diff_after_push"] < 0.02
    assert seen["weights_version"] == 2
