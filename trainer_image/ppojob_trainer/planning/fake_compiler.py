"""Compiled layers without a GPU: torch.compile's own graphs, computed operation by operation on fake tensors.

Called by `role_memory`. Dynamo, AOTAutograd and the min-cut partitioner, which decides what the forward pass keeps for
the backward pass, are those of a real run. Inductor is not: it makes kernels for a GPU that is not there. It fuses
operations whose results then need no memory, so inside one layer the plan takes a little too much for a moment.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from ppojob_trainer.engines.train.fsdp.layers import ATTENTION_PART, COMPILER, attention_part

__all__ = ["compile_on_fake_tensors"]

_BACKEND: Final = "aot_eager_decomp_partition"
"""PyTorch's own name for all of Inductor's steps before its kernels."""


def compile_on_fake_tensors(module: nn.Module) -> None:
    """Replace the compiler of each part that is to be compiled by one that needs no GPU.

    The engine has called `compile()` on the parts, and nothing is compiled before their first pass.
    """
    torch._dynamo.reset()
    for part in module.modules():
        if part._compiled_call_impl is not None:
            # A plan has few shapes, and code for any length would be compiled once more.
            part._compiled_call_impl = torch.compile(part._call_impl, backend=_BACKEND, dynamic=False, **COMPILER)
        if hasattr(part, ATTENTION_PART):
            function = attention_part(recomputes=part.recomputes)  # type: ignore[arg-type]
            setattr(part, ATTENTION_PART, torch.compile(function, backend=_BACKEND, dynamic=False, **COMPILER))
