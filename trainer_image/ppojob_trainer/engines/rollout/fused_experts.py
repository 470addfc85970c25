"""Reloads of models whose loader in vLLM 0.32 copies weights itself, and so is no part of vLLM's own reload.

vLLM's reload gives a model empty parameters, and counts what their weight loaders copy into them. The loader of gpt-oss
copies the fused experts of a layer and the sinks of its heads past these, so they would be lost. It also takes one
expert after the other, as some checkpoints have them, and those go by way of the weight loaders. So fused experts are
divided here. Sinks stay where they are while the model is reloaded, as vLLM leaves the biases of routers. Called by the
worker extension.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import meta

__all__ = ["one_by_one"]

_MODEL: Final = "GptOssForCausalLM"
_FUSED: Final = re.compile(r"(.*\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")
_SINKS: Final = "sinks"

meta.SKIP_LOAD_TENSORS.add(_SINKS)
meta.SKIP_TENSORS.add(_SINKS)


def one_by_one(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as the model's loader takes them in a reload: fused experts of gpt-oss one by one."""
    if type(model).__name__ != _MODEL:
        yield from tensors
        return
    for name, tensor in tensors:
        if (found := _FUSED.fullmatch(name)) is None:
            yield name, tensor
            continue
        experts, parameter = found.groups()
        for number, expert in enumerate(tensor):
            yield f"{experts}.{number}.{parameter}", expert
