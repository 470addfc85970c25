"""Which models can be divided over how many ranks: the answer comes from the configuration, with the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, Phi3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.engines.train.fsdp.divisions import check_divisions


def llama(**settings: Any) -> PretrainedConfig:
    return LlamaConfig(
        **{"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48, "intermediate_size": 64, **settings}
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"actor.tensorParallelSize": 4, "actor.sequenceParallelSize": 1},
        {"actor.sequenceParallelSize": 2},
        {"actor.tensorParallelSize": 2, "actor.sequenceParallelSize": 2},
        # Each key head on three ranks.
        {"critic.sequenceParallelSize": 12},
        {"actor.tensorParallelSize": 2, "actor.pipelineParallelSize": 5},
    ],
)
def test_sizes_that_divide_are_accepted(sizes: dict[str, int]) -> None:
    check_divisions(llama(num_hidden_layers=5), sizes)


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        (
            llama(),
            {"actor.tensorParallelSize": 8},
            "tensorParallelSize 8 does not divide .* num_attention_heads 12",
        ),
        (llama(), {"actor.tensorParallelSize": 6}, "num_key_value_heads 4: use a divisor"),
        (llama(intermediate_size=66), {"actor.tensorParallelSize": 4}, "intermediate_size 66"),
        (llama(), {"critic.sequenceParallelSize": 5}, "critic.sequenceParallelSize 5 .* num_attention_heads 12"),
        (llama(), {"actor.sequenceParallelSize": 6}, "num_key_value_heads 4 nor is divided by it"),
        (
            llama(),
            {"actor.tensorParallelSize": 4, "actor.sequenceParallelSize": 2},
            "actor.sequenceParallelSize 2 .* num_attention_heads 12 with tensorParallelSize 4",
        ),
        (
            llama(num_attention_heads=24, num_key_value_heads=6),
            {"critic.tensorParallelSize": 2, "critic.sequenceParallelSize": 4},
            "critic.sequenceParallelSize 4 does not divide this llama's num_key_value_heads 3",
        ),
        (
            llama(num_hidden_layers=5),
            {"actor.pipelineParallelSize": 6},
            "actor.pipelineParallelSize 6 is more than this llama's num_hidden_layers 5: use at most that",
        ),
        (
            llama(num_hidden_layers=5),
            {"critic.pipelineParallelSize": 2, "critic.virtualPipelineParallelSize": 3},
            "critic.virtualPipelineParallelSize 3 with pipelineParallelSize 2 is more than this llama's "
            "num_hidden_layers 5: let their product be at most that",
        ),
        (
            Qwen3MoeConfig(num_experts=12),
            {"actor.expertParallelSize": 8},
            "actor.expertParallelSize 8 does not divide this qwen3_moe's number of experts 12: use a divisor",
        ),
        (llama(), {"critic.expertParallelSize": 2}, "critic.expertParallelSize 2: llama is no mixture of experts: set"),
        (
            PretrainedConfig(model_type="mine"),
            {"actor.pipelineParallelSize": 2},
            "actor.pipelineParallelSize 2: mine has custom code, .* set it to 1",
        ),
        (Phi3Config(), {"actor.tensorParallelSize": 2}, "tensor parallelism of phi3 is not supported"),
        (PretrainedConfig(model_type="mine"), {"actor.tensorParallelSize": 2}, "mine has custom code, .*use sequence"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_by_its_field(
    config: PretrainedConfig, sizes: dict[str, int], says: str
) -> None:
    with pytest.raises(ModelMismatchError, match=says):
        check_divisions(config, sizes)


def test_experts_are_divided_with_slices_of_sequences_and_in_stages() -> None:
    sizes = {"actor.expertParallelSize": 4, "actor.sequenceParallelSize": 2, "actor.pipelineParallelSize": 3}
    check_divisions(Qwen3MoeConfig(num_experts=12), sizes)


def test_norms_of_heads_are_part_of_a_plan_that_is_computed() -> None:
    check_divisions(Qwen3Config(num_attention_heads=4, num_key_value_heads=2), {"actor.tensorParallelSize": 2})
