"""A random Llama of 60 thousand parameters with a HuggingFace folder, and random batches for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppojob_trainer.protocol import DataProto, Keys, rollout_batch

VOCABULARY = 97
RESPONSE_LENGTH = 7
SAME_UPDATES = 1e-2
"""How far two updates may be apart, as a share of the update. Orders of the sums differ by up to 1e-4, and an advantage
of one row of eight that is 1 % larger makes 3e-2."""


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


def make_batch(
    size: int,
    num_mini_batches: int = 2,
    epochs: int = 1,
    seed: int = 3,
    longest: tuple[int, int] = (9, RESPONSE_LENGTH),
) -> DataProto:
    """Random prompts and responses of different lengths, with all fields that the updates read."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    prompt, response = longest
    tensors = rollout_batch([tokens(prompt) for _ in range(size)], [tokens(response) for _ in range(size)])
    mask = tensors[Keys.RESPONSE_MASK]
    for key in (Keys.OLD_LOG_PROBS, Keys.REF_LOG_PROB, Keys.ADVANTAGES, Keys.VALUES, Keys.RETURNS):
        tensors[key] = mask.unpadded(torch.randn(size, RESPONSE_LENGTH, generator=generator))
    tensors[Keys.OLD_LOG_PROBS] = mask.with_values(tensors[Keys.OLD_LOG_PROBS].values - 3)
    meta = {
        "temperature": 0.7,
        "num_mini_batches": num_mini_batches,
        "epochs": epochs,
        "response_length": RESPONSE_LENGTH,
    }
    return DataProto.from_dict(tensors, meta_info=meta)


def assert_same_updates(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> None:
    """Compare what was added to all weights together.

    AdamW divides a gradient by its own size. So where one is next to nothing, its rounding decides in which direction
    that number goes, and by how much.
    """
    assert found.keys() == expected.keys() == before.keys()
    apart, moved = (
        torch.cat([(one[name] - other[name]).flatten() for name in before]).norm()
        for one, other in ((found, expected), (expected, before))
    )
    assert moved > 0
    assert apart < SAME_UPDATES * moved, f"{float(apart / moved):g} of the update"
