"""A vLLM engine whose two GPUs divide the experts of a mixture follows pushed weights: over NCCL and CUDA IPC.

Each GPU holds half of the experts, and gets no others. What vLLM records of its routers are the model's own numbers of
the experts, and not a GPU's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.divided_engine import EXPERTS, assert_follows, divided
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu(2)

LIMIT_SECONDS = 300
# 27 million parameters, nearly all of them of experts. One KV head is on both GPUs, and the 257 tokens of the
# vocabulary are 160 and 97.
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model: Path = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **SHAPE)
    found = divided(model, "CUDA", "nccl", "cuda_ipc", limit=LIMIT_SECONDS, kind=EXPERTS)
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("backend", ["nccl", "cuda_ipc"])
def test_both_gpus_follow_the_weights(seen: dict[str, Any], backend: str) -> None:
    # A few tokens have another expert, because the engine rounds.
    assert_follows(seen[backend])


@pytest.mark.parametrize("backend", ["nccl", "cuda_ipc"])
def test_vllm_records_the_models_own_numbers_of_experts(seen: dict[str, Any], backend: str) -> None:
    # A quarter if the numbers had nothing to do with the model's.
    assert seen[backend]["same experts"] > 0.9


def test_each_gpu_gets_its_experts_over_nccl(seen: dict[str, Any]) -> None:
    whole = seen["nccl"]["num_bytes"]
    assert seen["nccl"]["first"]["bytes"] == [whole] * 2
    assert all(0.5 * whole < number < 0.52 * whole for number in seen["nccl"]["new"]["bytes"])
    assert seen["cuda_ipc"]["new"]["bytes"] == [whole] * 2


def test_parts_of_the_other_gpu_are_refused(seen: dict[str, Any]) -> None:
    assert "are not those of the trainer's weights" in seen["nccl"]["refusal"]
