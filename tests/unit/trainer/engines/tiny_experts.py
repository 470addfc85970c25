"""A random mixture of experts with a HuggingFace folder, in the form of the hub: each expert by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE), dtype=dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder
