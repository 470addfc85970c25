"""Which models can be divided over how many ranks: the answer comes from the configuration, with the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.engines.train.fsdp.divisions import check_divisions
from ppojob_trainer.engines.train.model_fit import split_sequence


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
        # More ranks than heads, and sizes that do not divide them.
        {"critic.sequenceParallelSize": 32},
        {"critic.sequenceParallelSize": 5},
        {"actor.tensorParallelSize": 4, "actor.sequenceParallelSize": 2},
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
        (
            PretrainedConfig(model_type="mine", num_attention_heads=12, num_key_value_heads=4),
            {"critic.sequenceParallelSize": 8},
            "critic.sequenceParallelSize 8: mine has custom code, .* than divide its heads on a host: set it to 4",
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
        (
            DeepseekV3Config(),
            {"actor.tensorParallelSize": 2, "actor.expertParallelSize": 2},
            "actor.tensorParallelSize 2: tensor parallelism of deepseek_v3 is not supported .*: use sequence",
        ),
        (PretrainedConfig(model_type="mine"), {"actor.tensorParallelSize": 2}, "mine has custom code, .*use sequence"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_by_its_field(
    config: PretrainedConfig, sizes: dict[str, int], says: str
) -> None:
    with pytest.raises(ModelMismatchError, match=says):
        check_divisions(config, sizes)


@pytest.mark.parametrize(
    ("config", "size", "tensor", "split"),
    [
        (llama(), 4, 1, (4, 1)),
        (llama(), 8, 1, (4, 2)),
        (llama(), 4, 2, (2, 2)),
        (llama(), 2, 4, (1, 2)),
        (llama(num_attention_heads=24, num_key_value_heads=6), 4, 2, (1, 4)),
        (llama(num_key_value_heads=None), 24, 1, (12, 2)),
    ],
)
def test_a_sequence_parallel_size_is_split_for_the_heads_of_a_rank(
    config: PretrainedConfig, size: int, tensor: int, split: tuple[int, int]
) -> None:
    assert split_sequence(config, size, tensor) == split


def test_tensor_parallel_ranks_of_a_host_leave_fewer_that_divide_heads() -> None:
    config = llama(num_attention_heads=16, num_key_value_heads=16)
    assert split_sequence(config, 8, tensor=1, per_host=4) == (4, 2)
    assert split_sequence(config, 8, tensor=2, per_host=4) == (2, 4)


def test_custom_code_is_refused_with_more_ranks_than_a_host_has() -> None:
    mine = PretrainedConfig(model_type="mine", num_attention_heads=12, num_key_value_heads=4)
    check_divisions(mine, {"critic.sequenceParallelSize": 4}, per_host=4)
    with pytest.raises(ModelMismatchError, match=r"critic\.sequenceParallelSize 4: mine has custom code.*set it to 2"):
        check_divisions(mine, {"critic.sequenceParallelSize": 4}, per_host=2)


def test_experts_are_whole_on_tensor_parallel_ranks() -> None:
    sizes = {"actor.tensorParallelSize": 4, "actor.expertParallelSize": 2}
    check_divisions(MixtralConfig(intermediate_size=66), sizes)
    check_divisions(Qwen3MoeConfig(moe_intermediate_size=66), sizes)
    with pytest.raises(ModelMismatchError, match="intermediate_size 66"):
        # Of layers without experts.
        check_divisions(Qwen3MoeConfig(intermediate_size=66), sizes)


def test_code_of_a_checkpoint_may_divide_its_heads() -> None:
    mine = PretrainedConfig(model_type="mine", num_attention_heads=12, num_key_value_heads=4)
    check_divisions(mine, {"critic.sequenceParallelSize": 4})


def test_experts_are_divided_with_slices_of_sequences_and_in_stages() -> None:
    sizes = {"actor.expertParallelSize": 4, "actor.sequenceParallelSize": 2, "actor.pipelineParallelSize": 3}
    check_divisions(Qwen3MoeConfig(num_experts=12), sizes)


def test_norms_of_heads_are_part_of_a_plan_that_is_computed() -> None:
    check_divisions(Qwen3Config(num_attention_heads=4, num_key_value_heads=2), {"actor.tensorParallelSize": 2})
