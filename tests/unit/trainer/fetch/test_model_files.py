"""A model's files are chosen by name: one set of weights, what describes it, and code only where it is trusted."""

from __future__ import annotations

import pytest

from ppojob_trainer.commands.fetch.model_files import wanted

TEXTS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
TORCH = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
OTHERS = ["README.md", "LICENSE", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "x.gguf",
          "tf_model.h5", "training_args.bin", "figures/a.png"]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([*TEXTS, *SHARDS, *TORCH, *OTHERS], [*TEXTS, *SHARDS]),
        ([*TEXTS, *TORCH, *OTHERS], [*TEXTS, *TORCH]),
        ([*TEXTS, *OTHERS], []),
        (
            ["config.json", "model.safetensors", "additional_chat_templates/tools.jinja"],
            ["config.json", "model.safetensors", "additional_chat_templates/tools.jinja"],
        ),
    ],
)
def test_what_a_model_needs(names: list[str], found: list[str]) -> None:
    assert wanted(names, with_code=False) == sorted(found)


def test_code_comes_only_where_it_is_trusted() -> None:
    names = ["config.json", "model.safetensors", "modeling_x.py", "parts/attention.py"]

    assert wanted(names, with_code=False) == ["config.json", "model.safetensors"]
    assert wanted(names, with_code=True) == names
