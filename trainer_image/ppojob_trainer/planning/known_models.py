"""Shapes of well-known models, so that a plan needs no download: the fields of config.json that decide memory and work.

By the name of the repository on the hub, without `-Instruct`. Called by `configs`. A test compares the number of
parameters with the published one.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["KNOWN_MODELS"]


def _qwen(
    hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, vocabulary: int = 152_064
) -> dict[str, Any]:
    return _shape("qwen2", hidden, intermediate, layers, heads, key_heads) | {
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": vocabulary == _SMALL_VOCABULARY,
    }


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, *, tied: bool = False
) -> dict[str, Any]:
    return _shape("llama", hidden, intermediate, layers, heads, key_heads) | {
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": tied,
    }


def _experts(hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, of_expert: int) -> dict[str, Any]:
    return _shape("qwen3_moe", hidden, intermediate, layers, heads, key_heads) | {
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": of_expert,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_DEEPSEEK_V3: Final[dict[str, Any]] = {
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_MOONLIGHT: Final[dict[str, Any]] = {
    "vocab_size": 163_840,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _shape("gpt_oss", 2880, 2880, layers, 64, 8) | {
        "head_dim": 64,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    }


def _latent(hidden: int, intermediate: int, layers: int, heads: int, of_family: dict[str, Any]) -> dict[str, Any]:
    shape = _shape("deepseek_v3", hidden, intermediate, layers, heads, heads)
    # The configuration computes it from the sizes of latent attention.
    del shape["head_dim"]
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    settings = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
    return shape | sizes | settings | {"tie_word_embeddings": False} | of_family


def _shape(model_type: str, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": hidden // heads,
    }


# The Qwen2.5 models with this vocabulary share embedding and output layer.
_SMALL_VOCABULARY: Final = 151_936

KNOWN_MODELS: Final[dict[str, dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM2-135M": _shape("llama", 576, 1536, 30, 9, 3)
    | {"vocab_size": 49_152, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-0.5B": _qwen(896, 4864, 24, 14, 2, _SMALL_VOCABULARY),
    "Qwen/Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12, 2, _SMALL_VOCABULARY),
    "Qwen/Qwen2.5-3B": _qwen(2048, 11_008, 36, 16, 2, _SMALL_VOCABULARY),
    "Qwen/Qwen2.5-7B": _qwen(3584, 18_944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _qwen(5120, 13_824, 48, 40, 8),
    "Qwen/Qwen2.5-32B": _qwen(5120, 27_648, 64, 40, 8),
    "Qwen/Qwen2.5-72B": _qwen(8192, 29_568, 80, 64, 8),
    "Qwen/Qwen3-30B-A3B": _experts(2048, 6144, 48, 32, 4, 768),
    "Qwen/Qwen3-235B-A22B": _experts(4096, 12_288, 94, 64, 4, 1536),
    "mistralai/Mixtral-8x7B-v0.1": _shape("mixtral", 4096, 14_336, 32, 32, 8)
    | {
        "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    # OpenAI's own repositories have quantized weights.
    "unsloth/gpt-oss-20b-BF16": _gpt_oss(24, 32),
    "unsloth/gpt-oss-120b-BF16": _gpt_oss(36, 128),
    "moonshotai/Moonlight-16B-A3B": _latent(2048, 11_264, 27, 16, _MOONLIGHT),
    # DeepSeek's own repository has quantized weights.
    "unsloth/DeepSeek-V3-bf16": _latent(7168, 18_432, 61, 128, _DEEPSEEK_V3),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14_336, 32, 32, 8),
    "meta-llama/Llama-3.1-70B": _llama(8192, 28_672, 80, 64, 8),
}
