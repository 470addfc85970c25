"""Random mixtures of experts with a HuggingFace folder, in the form of the hub: each expert by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.unit.trainer.engines.tiny_llama import VOCABULARY

NUM_EXPERTS: Final = 6
PER_TOKEN: Final = 2
EXPERT_SIZE: Final = 32
NUM_LAYERS: Final = 3
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_experts_per_tok": PER_TOKEN,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Mixture:
    """A family. settings: beside `SHAPE`. dense: the layers without experts. of_hub: a part of the experts' names."""

    settings: Mapping[str, Any]
    of_hub: str
    dense: tuple[int, ...] = ()

    @property
    def num_sparse(self) -> int:
        """Layers with experts."""
        return NUM_LAYERS - len(self.dense)


MIXTURES: Final[dict[str, Mixture]] = {
    "qwen3_moe": Mixture(
        {
            "num_experts": NUM_EXPERTS,
            "moe_intermediate_size": EXPERT_SIZE,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
        ".mlp.experts.5.gate_proj.",
        dense=(1,),
    ),
    # Values are shorter than keys.
    "deepseek_v3": Mixture(
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "n_routed_experts": NUM_EXPERTS,
            "moe_intermediate_size": EXPERT_SIZE,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        },
        ".mlp.experts.5.gate_proj.",
        dense=(0,),
    ),
    # Its checkpoints have fused experts.
    "gpt_oss": Mixture(
        {"num_local_experts": NUM_EXPERTS, "intermediate_size": EXPERT_SIZE}, ".mlp.experts.gate_up_proj"
    ),
    "mixtral": Mixture(
        {"num_local_experts": NUM_EXPERTS, "intermediate_size": EXPERT_SIZE}, ".block_sparse_moe.experts.5.w1."
    ),
}


def save_tiny_experts(folder: Path, dtype: torch.dtype = torch.float32, family: str = "qwen3_moe") -> Path:
    return saved(tiny_experts(dtype, family), folder)


def save_starved_experts(folder: Path) -> Path:
    """A model whose tokens all use the first half of the experts: two of them, or two others."""
    model = tiny_experts(num_experts=8)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight") and len(weight) == 8:
            direction = weight.detach()[0].clone()
            with torch.no_grad():
                weight.zero_()[:4] = torch.stack([direction, 2 * direction, -direction, -2 * direction])
    return saved(model, folder)


def tiny_experts(dtype: torch.dtype = torch.float32, family: str = "qwen3_moe", **settings: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**SHAPE, **MIXTURES[family].settings, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    fill_biases(model)
    return model


def fill_biases(model: PreTrainedModel) -> None:
    """Draw the biases, which begin at 0, where they would not be seen; those of DeepSeek-V3's routers stay float32."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:
            module._buffers["e_score_correction_bias"] = 0.3 * torch.randn(NUM_EXPERTS)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder
