"""A small job, and its model's configuration in a folder without weights."""

import json
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec

VOCABULARY, HIDDEN, LAYERS = 2048, 128, 3
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def write_config(folder: Path, **changes: Any) -> str:
    """Write a config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def write_experts(folder: Path, **changes: Any) -> str:
    """Write the config.json of a mixture of experts without dense layers."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": HIDDEN // 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    return write_config(folder, **experts | changes)


def raw_job(path: str, gpus: int = 2, **sections: Any) -> dict[str, Any]:
    """Return a spec with all roles but a reward model in one pool; `sections` are merged into it."""
    spec: dict[str, Any] = {
        "image": "i",
        "model": {"actor": {"path": path}},
        "data": {
            "train": {"reasoningGym": {"task": "products"}},
            "trainBatchSize": 32,
            "maxPromptLength": 64,
            "maxResponseLength": 64,
        },
        "reward": {"function": {"module": "r"}},
        "algorithm": {"kl": {"inReward": True}},
        "actor": {"miniBatchSize": 32, "maxTokensPerGPU": 1024},
        "critic": {"miniBatchSize": 32, "maxTokensPerGPU": 1024},
        "pools": [{"name": "all", "gpusPerNode": gpus}],
        "placement": {"actor": "all"},
        "storage": {"claimName": "c"},
    }
    for name, values in sections.items():
        spec[name] = {**spec[name], **values} if isinstance(spec.get(name), dict) else values
    return spec


def job(path: str, gpus: int = 2, **sections: Any) -> PPOJobSpec:
    """Return the resolved spec of `raw_job`."""
    return resolve(parse_spec(raw_job(path, gpus, **sections)))
