"""Gradient checkpointing and compilation of decoder layers. Called by `model` before FSDP shards the layers.

    dense layer, or a mixture whose experts are sharded with it     [ norms, attention, MLP ]
    mixture whose experts FSDP gathers separately                   [ norm, attention ]  norm, experts

What is in brackets is compiled. FSDP's hooks on the experts are Python, which breaks a graph, and torch 2.13 compiles
nothing of a recomputed function whose graph breaks. So such a layer is computed in two parts, each with a checkpoint of
its own: between them, the hidden states stay in memory until the backward pass.

A router's second choice must be the first one, because autograd joins what both passes computed: the loss is that of
the first choice, and the tensors for its gradients are those of the second. torch compares their shapes alone
(`determinism_check`), and other experts have the same shapes. Equal inputs promise an equal choice only with kernels
that always add in the same order. So the choice of the first pass is kept, with 2 bytes for each expert of a token.
What is compiled chooses again: tracing knows no list that outlives a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ppojob_trainer.engines.train.fsdp.experts import expert_modules, plan_once
from ppojob_trainer.engines.train.fsdp.routing import choose_once, routers_of

__all__ = ["ATTENTION_PART", "COMPILER", "attention_part", "prepare_layer"]

ATTENTION_PART: Final = "attention_part"
"""Name of a layer's attribute with its compiled first part; layers that are computed as a whole do not have it."""
COMPILER: Final[Mapping[str, Any]] = {"recompile_limit": 64}
"""Arguments of torch.compile with any backend. It compiles a function again for each set of conditions, of all layers
together: with gradients, without, without adapters; for a fixed size and for any; with a window and without. Beyond the
limit (torch's default: 8), it computes without compilation and only logs it."""
_INDUCTOR: Final[Mapping[str, bool]] = {"triton.mix_order_reduction_non_strict_mode": True}
"""Options of torch.compile's own backend. By default, the number of tokens decides whether a sum over tokens and one
over a token's numbers become one kernel. A warm-up has fewer, so the first step would compile the layers again."""
_EQUAL_SUMS: Final[Mapping[str, bool]] = {"batch_invariant": True}
"""Options with which equal kernels of passes with and without gradients add in the same order. By default, Inductor
measures for each pass which block size of a sum is faster, and for sums over more than 2,048 numbers it has two that
are equally fast. In a mixture, the difference grows from layer to layer."""
_MIXTURE: Final = "mixture"
"""Name of a layer's attribute with its `_Mixture`, if the layer is recomputed with one choice of experts."""


@dataclass(frozen=True)
class _Mixture:
    """The router and the experts of a layer: to search the layer for them takes a tenth of a millisecond."""

    router: nn.Module
    experts: nn.Module


def prepare_layer(layer: nn.Module, *, recomputes: bool, compiles: bool, gathers_experts: bool) -> None:
    """Let a layer compute with gradient checkpointing, compiled, or both.

    Args:
        gathers_experts: whether FSDP gathers the layer's experts separately, if it has any.
    """
    if compiles and gathers_experts and any(expert_modules(layer)):
        part = torch.compile(attention_part(recomputes=recomputes), options={**_INDUCTOR, **_EQUAL_SUMS}, **COMPILER)
        setattr(layer, ATTENTION_PART, part)
        layer.recomputes = recomputes  # type: ignore[assignment]
        _find_mixture(layer)
        layer.forward = MethodType(_in_parts, layer)
        return
    if recomputes:
        if keeps_choice := not compiles and any(routers_of(layer)):
            _find_mixture(layer)
        layer.forward = MethodType(_recomputed_with_choice if keeps_choice else _recomputed, layer)
    if compiles:
        layer.compile(options=dict(_INDUCTOR), **COMPILER)


def attention_part(*, recomputes: bool) -> Callable[..., Tensor]:
    """Return the function of a layer's first part, which is compiled."""
    return _recomputed_attention if recomputes else _attention


def _find_mixture(layer: nn.Module) -> None:
    (router,), ((_, experts),) = routers_of(layer), expert_modules(layer)
    setattr(layer, _MIXTURE, _Mixture(router, experts))


def _in_parts(layer: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Compute `forward` of a layer with experts, as all families in transformers that have some define it."""
    hidden_states = getattr(layer, ATTENTION_PART)(layer, hidden_states, **options)
    if not layer.recomputes:
        return _experts(layer, hidden_states)
    found: Tensor = _with_choice(layer, _experts, hidden_states)
    return found


def _attention(layer: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    attended: Tensor = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)[0]
    return hidden_states + attended


def _experts(layer: Any, hidden_states: Tensor) -> Tensor:
    transformed = layer.mlp(_normed(layer.post_attention_layernorm, hidden_states))
    # gpt-oss returns the router's scores, too.
    summed: Tensor = hidden_states + (transformed[0] if isinstance(transformed, tuple) else transformed)
    return summed


def _normed(norm: Any, hidden_states: Tensor) -> Tensor:
    """Compute `forward` of a norm by torch's kernel, as torch.compile would: rounded once, at the end."""
    if "forward" in vars(norm):
        # Tensor-parallel: it computes with plain parts of its parameters.
        found: Tensor = norm(hidden_states)
        return found
    return _rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


def _rms_norm(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(hidden_states, weight.shape, weight, epsilon)


# The checkpoints lie inside what is compiled: torch recomputes what it calls around compiled code without that code,
# and saves other tensors then. As functions of ours, and not `partial`s of torch's, because torch compiles nothing in a
# frame that is its own.
def _recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _recomputed_attention(layer: nn.Module, hidden_states: Tensor, **options: Any) -> Any:
    return checkpoint(_attention, layer, hidden_states, use_reentrant=False, **options)


def _recomputed_with_choice(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _with_choice(layer, type(layer).forward, *args, **kwargs)


def _with_choice(layer: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a function of a layer with gradient checkpointing and one choice of experts."""
    mixture: _Mixture = getattr(layer, _MIXTURE)
    # Of this call alone: other micro-batches of a pipeline come before its backward pass.
    chosen: list[Tensor] = []
    plans: list[Any] = []

    def compute(*args: Any, **kwargs: Any) -> Any:
        with choose_once(mixture.router, chosen), plan_once(mixture.experts, plans):
            return function(layer, *args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, **kwargs)
