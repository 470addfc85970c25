"""Settings of small mixtures of experts, for `tiny_model.write_tiny_model`, with which vLLM computes."""

from typing import Any

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
    # vLLM computes YaRN for this family whatever the configuration says.
    "gpt_oss": {
        "num_local_experts": 8,
        "intermediate_size": 32,
        "head_dim": 32,
        "sliding_window": 16,
        "rope_parameters": {
            **{name: value for name, value in YARN.items() if not name.startswith("mscale")},
            "truncate": False,
        },
    },
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32, "head_dim": 32},
}
