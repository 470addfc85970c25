"""A reward model of random weights, whose vocabulary and chat template are not the policy's."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<end>"


def write_reward_model(folder: Path) -> Path:
    """Write the folder: a Llama with one label that reads characters, in another order."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    characters = sorted({chr(code) for code in range(32, 127)} | {"\n"}, reverse=True)
    vocabulary = {"<pad>": 0, "<unknown>": 1, **{character: number + 2 for number, character in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        num_labels=1,
        initializer_range=0.2,
    )
    LlamaForSequenceClassification(config).bfloat16().save_pretrained(folder)
    return folder
