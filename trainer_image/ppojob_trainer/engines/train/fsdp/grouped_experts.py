"""The experts of a layer, by grouped matrix products of rows that are sorted by expert.

    rows [S, D]  ─ gate and up ─▶  [S, 2 I]  ─ silu(gate) * up * weight ─▶  [S, I]  ─ down ─▶  [S, D]

A token's weight of an expert is applied before the last product, which is linear, because rows are the smallest there
and the backward pass then needs no result of the last product. Frozen parameters get no gradients. Adapters
(`low_rank`) add to the result of each product, over the same rows. In bfloat16 this sum is rounded stochastically
(`maths.rounding`), because a small change of a rounded result would be rounded off. Biases, which gpt-oss has, are
grouped products too: of 1, or of the row's weight, with the expert's bias. So their gradients are summed in float32, in
a fixed order. Called by `experts`; transformers chooses the kernel of the products: a grouped one on the CPU and on
GPUs from compute capability 8.0, else one product for each expert.

Suffixes: S rows, I size of an expert's hidden layer, D size of the hidden states, E experts.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate, _grouped_linear

from ppojob_trainer.engines.train.fsdp.expert_rows import kernels
from ppojob_trainer.maths.rounding import round_each

__all__ = ["ADAPTERS", "ALIGNED", "multiply"]

ALIGNED: Final = 8
"""Numbers of which a GPU's grouped product needs a multiple in a row: 16 bytes in bfloat16, and 32 in float32."""
ADAPTERS: Final = "adapters"
"""Name of the experts' module with the adapters of their parameters, by the parameter's name; most have none."""


def multiply(experts: Any, rows_SD: Tensor, weights_S: Tensor, ends_E: Tensor) -> Tensor:
    """Return the weighted results of the rows' experts, [S, D]. There may be no row.

    Args:
        experts: transformers' module, or a view of it with other parameters.
        rows_SD: sorted by expert, in the dtype of the parameters; weights_S: of the rows, float32 or as the rows.
        ends_E: after which row the rows of each expert end, int32 [E].
    """
    number = len(rows_SD)
    if number == 0:
        # Kernels need not accept a product without rows, and FSDP needs gradients, of zeros, on each rank.
        rows_SD, weights_S = functional.pad(rows_SD, (0, 0, 0, 1)), functional.pad(weights_S, (0, 1))
        ends_E = torch.ones_like(ends_E)
    inner = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows_SD, ends_E)
    output = _product(experts, "down_proj", _weighted(experts, inner, weights_S), ends_E, weights_S)
    # Not a view, of which FSDP would warn.
    return output if number else output[:0].clone()


def _product(experts: Any, name: str, rows: Tensor, ends_E: Tensor, weights_S: Tensor | None = None) -> Tensor:
    """Return the rows times their experts' parameter of this name, with its bias and what its adapters add.

    Args:
        weights_S: by which the rows have been multiplied; None: they have not.
    """
    adapters = getattr(experts, ADAPTERS, None) or {}
    # Before the base's product: a recomputed layer computes again until the last saved tensor, which is then the base's
    # parameter, so its product is not computed again.
    added = adapters[name](rows, ends_E) if name in adapters else None
    output: Tensor = _grouped_linear(rows, getattr(experts, name), ends_E, is_transposed=experts.is_transposed)
    # In place, because nothing saves the base's product.
    if experts.has_bias:
        output.add_(_biases(getattr(experts, f"{name}_bias"), rows, ends_E, weights_S))
    return output if added is None else _sum(output, added)


def _biases(bias_EO: Tensor, rows: Tensor, ends_E: Tensor, weights_S: Tensor | None) -> Tensor:
    """Return the bias of each row's expert times the row's weight, [S, O]."""
    weights_S = rows.new_ones(len(rows)) if weights_S is None else weights_S.to(rows.dtype)
    weights_SN, bias_EON = (functional.pad(one.unsqueeze(-1), (0, ALIGNED - 1)) for one in (weights_S, bias_EO))
    products: Tensor = _grouped_linear(weights_SN, bias_EON, ends_E)
    return products


def _sum(output: Tensor, added: Tensor) -> Tensor:
    """Add what adapters add to the base's product, in place if not compiled. Small numbers are not rounded off."""
    if output.dtype is not torch.bfloat16:
        return output.add_(added)
    if torch.compiler.is_compiling():
        total = output.float() + added.float()
        # The gradient is that of the sum, of which the difference is 0.
        return round_each(total.detach()) + (total - total.detach()).to(output.dtype)
    found: Tensor = _Sum.apply(output, added)  # type: ignore[no-untyped-call]
    return found


def _weighted(experts: Any, inner: Tensor, weights_S: Tensor) -> Tensor:
    """Return the activations times the weights of their rows, in the dtype of `inner`."""
    # torch.compile fuses what plain PyTorch computes.
    is_silu = _has_default_gate(experts) and isinstance(experts.act_fn, SiLUActivation | nn.SiLU)
    if is_silu and not torch.compiler.is_compiling():
        found: Tensor = _Gate.apply(inner, weights_S)  # type: ignore[no-untyped-call]
        return found
    activated: Tensor = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return (activated * weights_S.unsqueeze(1)).to(inner.dtype)


def _has_default_gate(experts: Any) -> bool:
    """Return whether there is a gate, and it is act_fn(gate) * up; a family may have another one."""
    return experts.has_gate and getattr(experts._apply_gate, "__func__", None) is _default_apply_gate


class _Sum(torch.autograd.Function):
    """The sum of two tensors in bfloat16, in the first of them, rounded stochastically; nothing is saved."""

    @staticmethod
    def forward(ctx: Any, into: Tensor, added: Tensor) -> Tensor:
        ctx.mark_dirty(into)
        if (found := kernels(into)) is not None:
            assert into.is_contiguous()
            found.add(into, added.contiguous())
            return into
        return into.copy_(round_each(into.float() + added.float()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]


class _Gate(torch.autograd.Function):
    """silu(gate) * up * weight; the backward pass needs the inputs alone."""

    @staticmethod
    def forward(ctx: Any, both_SI: Tensor, weights_S: Tensor) -> Tensor:
        both_SI = both_SI.contiguous()
        ctx.save_for_backward(both_SI, weights_S)
        if (found := kernels(both_SI)) is not None:
            result: Tensor = found.gate(both_SI, weights_S)
            return result
        gate, up = both_SI.chunk(2, dim=1)
        return functional.silu(gate).mul_(up).mul_(weights_S.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        both_SI, weights_S = ctx.saved_tensors
        (outer,) = gradients
        if (found := kernels(both_SI)) is not None:
            both: tuple[Tensor, Tensor] = found.gate_gradients(both_SI, weights_S, outer.contiguous())
            return both
        gate, up = both_SI.chunk(2, dim=1)
        silu = functional.silu(gate)
        grad_weights = (silu * up).mul_(outer).sum(1, dtype=weights_S.dtype)
        outer = outer * weights_S.unsqueeze(1).to(outer.dtype)
        grad = torch.empty_like(both_SI)
        torch.mul(outer, silu, out=grad[:, grad.shape[1] // 2 :])
        grad[:, : grad.shape[1] // 2] = torch.ops.aten.silu_backward(outer.mul_(up), gate)
        return grad, grad_weights
