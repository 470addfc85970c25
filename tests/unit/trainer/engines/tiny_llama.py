"""A random Llama of 60 thousand parameters with a HuggingFace folder, and random batches for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppojob_trainer.protocol import DataProto, Keys, rollout_batch

VOCABULARY = 97


def save_tiny_model(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            # Large, so that the distributions are far from uniform.
            "initializer_range": 0.3,
            **settings,
        }
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a tokenizer": true}')
    (folder / "pytorch_model.bin").write_bytes(b"weights that must not be copied")
    return folder


def make_batch(size: int, num_mini_batches: int = 2, epochs: int = 1, seed: int = 3) -> DataProto:
    """Random prompts and responses of different lengths, with all fields that the updates read."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(longest: int) -> list[int]:
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    tensors = rollout_batch([tokens(9) for _ in range(size)], [tokens(7) for _ in range(size)], 0, 9, 7)
    mask = tensors[Keys.RESPONSE_MASK]
    for key in (Keys.OLD_LOG_PROBS, Keys.REF_LOG_PROB, Keys.ADVANTAGES, Keys.VALUES, Keys.RETURNS):
        tensors[key] = torch.randn(mask.shape, generator=generator) * mask
    tensors[Keys.OLD_LOG_PROBS] -= 3 * mask
    meta = {"temperature": 0.7, "num_mini_batches": num_mini_batches, "epochs": epochs}
    return DataProto.from_dict(tensors, meta_info=meta)
