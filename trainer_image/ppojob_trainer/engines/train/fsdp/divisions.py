"""Checks from its configuration whether the sizes of the spec divide a model: its heads, layers, stages and experts.

Called by the engine's check, before anything is loaded. The error names the field of the spec and the size that is not
divisible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.engines.train.fsdp.tensor_parallel import KNOWN_STYLES, plan_of
from ppojob_trainer.engines.train.model_fit import (
    check_heads,
    check_is_mixture,
    indivisible,
    num_experts,
    split_sequence,
)
from ppojob_trainer.models.support import FAMILIES

_SEQUENCE, _TENSOR, _PIPELINE = "sequenceParallelSize", "tensorParallelSize", "pipelineParallelSize"
_VIRTUAL, _EXPERT = "virtualPipelineParallelSize", "expertParallelSize"


def check_divisions(config: PretrainedConfig, sizes: Mapping[str, int], per_host: int | None = None) -> None:
    """Check each size by the path of its field, such as `actor.tensorParallelSize`.

    Args:
        per_host: the role's ranks on a host; None: all of them.

    Raises:
        ModelMismatchError: a part of the model is not divisible by a size.
    """
    text: Any = config.get_text_config()
    for field, size in sizes.items():
        if size == 1:
            continue
        if field.endswith(_PIPELINE):
            _check_stages(config, text, field, size)
        elif field.endswith(_VIRTUAL):
            _check_virtual_stages(text, field, size, sizes.get(field.replace(_VIRTUAL, _PIPELINE), 1))
        elif field.endswith(_EXPERT):
            _check_experts(text, field, size)
        elif field.endswith(_SEQUENCE):
            tensor = sizes.get(field.replace(_SEQUENCE, _TENSOR), 1)
            _check_sequence_parallel(config, field, size, split_sequence(config, size, tensor, per_host))
        else:
            _check_tensor_parallel(config, text, field, size)


def _check_stages(config: PretrainedConfig, text: Any, field: str, size: int) -> None:
    """Check that the model can be cut between any two layers, and has a layer for each stage."""
    if config.model_type not in FAMILIES:
        raise ModelMismatchError(
            f"{field} {size}: {config.model_type} has custom code, which may need all layers on each rank: set it to 1"
        )
    if text.num_hidden_layers < size:
        raise ModelMismatchError(
            f"{field} {size} is more than this {text.model_type}'s num_hidden_layers {text.num_hidden_layers}: use at "
            "most that"
        )


def _check_virtual_stages(text: Any, field: str, size: int, ranks: int) -> None:
    """Check that the model has a layer for each stage of the pipeline's ranks."""
    if text.num_hidden_layers < size * ranks:
        raise ModelMismatchError(
            f"{field} {size} with {_PIPELINE} {ranks} is more than this {text.model_type}'s num_hidden_layers "
            f"{text.num_hidden_layers}: let their product be at most that"
        )


def _check_experts(text: Any, field: str, size: int) -> None:
    """Check that the model has experts, and each rank equally many."""
    check_is_mixture(text, field, size, "set it to 1")
    number = num_experts(text) or 0
    if number % size:
        raise ModelMismatchError(indivisible(text, field, size, "number of experts", f"{number}: use a divisor"))


def _check_tensor_parallel(config: PretrainedConfig, text: Any, field: str, size: int) -> None:
    if config.model_type not in FAMILIES:
        raise ModelMismatchError(
            f"{field} {size}: {config.model_type} has custom code, whose plan no test compares with its layers: use "
            f"{_SEQUENCE}"
        )
    plan = plan_of(text)
    unknown = set(plan.values()) - KNOWN_STYLES if plan else {"no plan"}
    if unknown:
        raise ModelMismatchError(
            f"{field} {size}: tensor parallelism of {text.model_type} is not supported ({', '.join(sorted(unknown))}): "
            f"use {_SEQUENCE}"
        )
    check_heads(text, field, size)
    # Experts are whole, and Mixtral has no other MLPs.
    has_mlps = any(name.endswith(".mlp.down_proj") for name in plan)
    for what in ("num_key_value_heads", "intermediate_size") if has_mlps else ("num_key_value_heads",):
        number = int(getattr(text, what, None) or text.num_attention_heads)
        if number % size:
            raise ModelMismatchError(indivisible(text, field, size, what, f"{number}: use a divisor"))


def _check_sequence_parallel(config: PretrainedConfig, field: str, size: int, split: tuple[int, int]) -> None:
    """Check that no rank gathers keys in code that is not tested with it. Every size can be split."""
    heads, context = split
    if context > 1 and config.model_type not in FAMILIES:
        raise ModelMismatchError(
            f"{field} {size}: {config.model_type} has custom code, and no test compares it with more ranks than divide "
            f"its heads on a host: set it to {heads}"
        )
