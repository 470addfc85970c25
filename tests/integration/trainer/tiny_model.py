"""A causal language model that loads in a second: two layers with random weights, and a tokenizer of single bytes.

The weights are large enough that a sampled token has a probability far from that of a uniform distribution. So rollout
and trainer differ visibly in `training/rollout_probs_diff_mean` as soon as one of them has other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

INITIALIZER_RANGE = 0.3
"""Standard deviation of the weights: with 64 hidden numbers that of a logit is about 2.4."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tiny_model(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """Write the model's HuggingFace folder; head_dim is 32, the least that vLLM computes on a CPU.

    Args:
        settings: of the family's configuration, in place of the usual ones.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{character: number + 1 for number, character in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(vocabulary),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "eos_token_id": 0,
            "bos_token_id": 0,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "initializer_range": INITIALIZER_RANGE,
            **settings,
        },
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for module in model.modules():
        # The biases of DeepSeek-V3's routers, which begin at 0, where a bias that is lost would not be seen.
        if (bias := module._buffers.get("e_score_correction_bias")) is not None:
            module._buffers["e_score_correction_bias"] = 0.3 * torch.randn(len(bias))
    model.save_pretrained(folder)
    return folder
