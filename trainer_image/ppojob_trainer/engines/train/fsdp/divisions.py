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
from ppojob_trainer.engines.train.model_fit import check_heads, check_is_mixture, indivisible, num_experts
from ppojob_trainer.models.support import FAMILIES

_SEQUENCE, _TENSOR, _PIPELINE = "sequenceParallelSize", "tensorParallelSize", "pipelineParallelSize"
_VIRTUAL, _EXPERT = "virtualPipelineParallelSize", "expertParallelSize"


def check_divisions(config: PretrainedConfig, sizes: Mapping[str, int]) -> None:
    """Check each size by the path of its field, such as `actor.tensorParallelSize`.

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
            _check_sequence_parallel(text, field, size, tensor)
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
    for what in ("num_key_value_heads", "intermediate_size"):
        number = int(getattr(text, what, None) or text.num_attention_heads)
        if number % size:
            raise ModelMismatchError(indivisible(text, field, size, what, f"{number}: use a divisor"))


def _check_sequence_parallel(text: Any, field: str, size: int, tensor: int) -> None:
    """Check the heads that each of `tensor` tensor-parallel ranks has."""
    heads = int(text.num_attention_heads)
    if tensor > 1 and heads % (tensor * size):
        remedy = f"{heads} with {_TENSOR} {tensor}: let their product be a divisor"
        raise ModelMismatchError(indivisible(text, field, size, "num_attention_heads", remedy))
    check_heads(text, field, size)
    _check_key_heads(text, field, size, tensor)


def _check_key_heads(text: Any, field: str, size: int, tensor: int) -> None:
    """Check the key heads. There may be fewer than ranks: each is then computed on several ranks."""
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    if heads % tensor == 0:
        # If not, the check of tensor parallelism says so.
        heads //= tensor
    if heads % size and size % heads:
        remedy = f"{heads} nor is divided by it: use a divisor or a multiple"
        raise ModelMismatchError(indivisible(text, field, size, "num_key_value_heads", remedy))
