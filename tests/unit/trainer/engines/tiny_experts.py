"""A random mixture of experts with a HuggingFace folder, in the form of the hub: each expert by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.unit.trainer.engines.tiny_llama import VOCABULARY

NUM_EXPERTS: Final = 6
PER_TOKEN: Final = 2
EXPERT_SIZE: Final = 32
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": EXPERT_SIZE,
    # The second layer is dense.
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def save_tiny_experts(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    return saved(tiny_experts(dtype), folder)


def save_starved_experts(folder: Path) -> Path:
    """A model whose tokens all use the first half of the experts: two of them, or two others."""
    model = tiny_experts(num_experts=8)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight") and len(weight) == 8:
            direction = weight.detach()[0].clone()
            with torch.no_grad():
                weight.zero_()[:4] = torch.stack([direction, 2 * direction, -direction, -2 * direction])
    return saved(model, folder)


def tiny_experts(dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE | settings), dtype=dtype)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder
