"""The shapes that come with the plan have the published number of parameters."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppojob_trainer.planning.configs import read_shape
from ppojob_trainer.planning.known_models import KNOWN_MODELS

# From the models' cards, in billions.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": 0.135,
    "Qwen/Qwen2.5-0.5B": 0.49,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen2.5-14B": 14.7,
    "Qwen/Qwen2.5-32B": 32.5,
    "Qwen/Qwen2.5-72B": 72.7,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "unsloth/gpt-oss-20b-BF16": 20.9,
    "unsloth/gpt-oss-120b-BF16": 116.8,
    "moonshotai/Moonlight-16B-A3B": 16,
    "unsloth/DeepSeek-V3-bf16": 671,
    "meta-llama/Llama-3.2-1B": 1.23,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.6,
}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_number_of_parameters(name: str) -> None:
    config = read_shape("model.actor.path", f"hf://{name}", False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx(PUBLISHED[name], rel=0.015)
    assert config.dtype == torch.bfloat16


def test_an_instruct_model_and_a_revision_have_the_same_shape() -> None:
    for address in ("hf://Qwen/Qwen2.5-7B-Instruct", "hf://Qwen/Qwen2.5-7B@main"):
        assert read_shape("model.actor.path", address, False).hidden_size == 3584
