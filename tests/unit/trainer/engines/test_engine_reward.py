"""A reward model's score is what transformers gives for the sequence alone, whatever it shares a pass with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from ppojob_trainer.engines.errors import ModelNotFoundError, ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp.reward import RewardModelEngine, check_reward_model, padded_parts
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines.tiny_llama import VOCABULARY, save_tiny_model


def save_llama(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        num_labels=settings.pop("num_labels", 1),
        **settings,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def save_bert(folder: Path) -> Path:
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        num_labels=3,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def sequences(size: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 30, (size,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def alone(path: Path, tokens: list[int], label: int = 0) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.tensor([tokens])).logits[0, label])


def engine_of(parallel: ParallelMesh, path: Path, **options: Any) -> RewardModelEngine:
    given = {"max_tokens_per_gpu": 64, "dtype": torch.float32, **options}
    return RewardModelEngine(parallel, str(path), **given)


@pytest.mark.parametrize("settings", [{}, {"pad_token_id": 0}, {"pad_token_id": 7}], ids=["no pad", "pad 0", "pad 7"])
def test_a_decoders_scores_are_those_of_each_sequence_alone(
    parallel: ParallelMesh, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = save_llama(tmp_path, **settings)
    # With pad token 7, transformers reads the score before a 7 at the end.
    rows = [*sequences(), [3, 4, 7], [3, 4]]

    scores = engine_of(parallel, path).score(rows)

    expected = [alone(path, row) for row in rows]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-5, rtol=1e-4)
    if settings.get("pad_token_id") == 7:
        # Two and three tokens take different kernels, which add in another order; the score at the 7 itself is far off.
        assert expected[-1] == pytest.approx(expected[-2], rel=1e-4, abs=1e-5)


def test_an_encoder_and_a_chosen_label(parallel: ParallelMesh, tmp_path: Path) -> None:
    path, rows = save_bert(tmp_path), sequences()

    scores = engine_of(parallel, path, label=2).score(rows)

    torch.testing.assert_close(scores, torch.tensor([alone(path, row, 2) for row in rows]), atol=1e-5, rtol=1e-4)


def test_the_size_of_a_pass_changes_no_score(parallel: ParallelMesh, tmp_path: Path) -> None:
    path, rows = save_llama(tmp_path), sequences()

    one, many = (engine_of(parallel, path, max_tokens_per_gpu=size).score(rows) for size in (1, 4096))

    torch.testing.assert_close(one, many, atol=1e-5, rtol=1e-4)


def test_weights_are_bfloat16_and_the_head_computes_in_float32(parallel: ParallelMesh, tmp_path: Path) -> None:
    path, rows = save_llama(tmp_path), sequences()

    engine = engine_of(parallel, path, dtype=torch.bfloat16)
    scores = engine.score(rows)

    dtypes = {name: value.dtype for name, value in engine.model.named_parameters()}
    assert dtypes.pop("score.weight") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert not any(value.requires_grad for value in engine.model.parameters())
    torch.testing.assert_close(scores, torch.tensor([alone(path, row) for row in rows]), atol=0.3, rtol=0.1)
    assert (scores.bfloat16().float() != scores).any(), "scores are finer than bfloat16"


def test_a_model_without_a_trained_head_is_refused(parallel: ParallelMesh, tmp_path: Path) -> None:
    causal = save_tiny_model(tmp_path / "causal")
    with pytest.raises(ModelUnsupportedError, match=r"is a LlamaForCausalLM: a reward model is a sequence classifier"):
        check_reward_model(str(causal), 0, False)
    text = (causal / "config.json").read_text()
    (causal / "config.json").write_text(text.replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    with pytest.raises(ModelUnsupportedError, match=r"has no weights for score\.weight"):
        engine_of(parallel, causal)


def test_a_missing_folder_and_a_label_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is not a folder"):
        check_reward_model(str(tmp_path / "nothing"), 0, False)
    with pytest.raises(ModelUnsupportedError, match=r"label 1: the model in .* has 1 labels"):
        check_reward_model(str(save_llama(tmp_path)), 1, False)


def test_a_folder_without_weights_is_no_model(parallel: ParallelMesh, tmp_path: Path) -> None:
    path = save_llama(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="holds no weights that can be read"):
        engine_of(parallel, path)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "parts"),
    [
        ([5], 1, [[0]]),
        ([2, 9, 4, 4], 9, [[1], [2, 3], [0]]),
        ([3, 3, 3, 3], 6, [[0, 1], [2, 3]]),
        ([1, 2, 3], 100, [[2, 1, 0]]),
    ],
)
def test_parts_hold_similar_lengths_within_the_limit(
    lengths: list[int], max_tokens: int, parts: list[list[int]]
) -> None:
    assert padded_parts(lengths, max_tokens) == parts
