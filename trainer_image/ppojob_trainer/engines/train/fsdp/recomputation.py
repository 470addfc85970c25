"""Gradient checkpointing of a decoder layer: the backward pass computes its forward pass again. Called by `model`.

A router's second choice must be the first one, because autograd joins what both passes computed: the loss is that of
the first choice, and the tensors for its gradients are those of the second. torch compares their shapes alone
(`determinism_check`), and other experts have the same shapes. Equal inputs promise an equal choice only with kernels
that always add in the same order. So the choice of the first pass is kept, with 2 bytes for each expert of a token.

It refuses nothing. Compiled layers choose again: tracing knows no list that outlives a call.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ppojob_trainer.engines.train.fsdp.routing import choose_once, routers_of

__all__ = ["recompute"]


def recompute(layer: nn.Module, *, is_compiled: bool) -> None:
    """Compute a layer's `forward` with gradient checkpointing; before it is compiled and sharded."""
    keeps = not is_compiled and any(routers_of(layer))
    layer.forward = MethodType(_recomputed_with_choices if keeps else _recomputed, layer)


def _recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a layer.

    The checkpoint lies inside what is compiled: torch recomputes what it calls around compiled code without that code,
    and saves other tensors then. As a function of ours, and not a `partial` of torch's, because torch compiles nothing
    in a frame that is its own.
    """
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _recomputed_with_choices(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Of this call alone: other micro-batches of a pipeline come before its backward pass.
    chosen: list[Tensor] = []

    def compute(*args: Any, **kwargs: Any) -> Any:
        with choose_once(layer, chosen):
            return type(layer).forward(layer, *args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, **kwargs)
