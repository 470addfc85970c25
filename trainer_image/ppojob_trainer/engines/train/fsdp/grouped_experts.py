"""The experts of a layer, by grouped matrix products of rows that are sorted by expert.

    rows [S, D]  ─ gate and up ─▶  [S, 2 I]  ─ gate, times weight ─▶  [S, I]  ─ down ─▶  [S, D]

A token's weight of an expert is applied before the last product, which is linear, because rows are the smallest there
and the backward pass then needs no result of the last product. Frozen parameters get no gradients. Adapters
(`low_rank`) add to the result of each product, over the same rows. In bfloat16 this sum is rounded stochastically
(`maths.rounding`), because a small change of a rounded result would be rounded off. gpt-oss has biases: that of the
first product is added by the gate (`expert_gates`) if it is not compiled, else by a grouped product with 1, and that of
the last one by a grouped product with the row's weight. So their gradients are summed in float32, in a fixed order.
Called by `experts`; `grouped_products` says which kernel multiplies.

Suffixes: S rows, I size of an expert's hidden layer, D size of the hidden states, E experts.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import _grouped_linear

from ppojob_trainer.engines.train.fsdp.expert_gates import Gate
from ppojob_trainer.engines.train.fsdp.expert_rows import kernels
from ppojob_trainer.engines.train.fsdp.grouped_products import ALIGNED
from ppojob_trainer.maths.rounding import round_each

__all__ = ["ADAPTERS", "multiply"]

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
    inner_SI = _inner(experts, rows_SD, weights_S, ends_E)
    bias = (experts.down_proj_bias, weights_S.to(inner_SI.dtype)) if experts.has_bias else None
    output = _product(experts, "down_proj", inner_SI, ends_E, bias)
    # Not a view, of which FSDP would warn.
    return output if number else output[:0].clone()


def _inner(experts: Any, rows_SD: Tensor, weights_S: Tensor, ends_E: Tensor) -> Tensor:
    """Return the activations times the weights of their rows, [S, I], in the dtype of the rows."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    bias_EG = getattr(experts, f"{name}_bias") if experts.has_bias else None
    # torch.compile fuses what plain PyTorch computes.
    if not torch.compiler.is_compiling() and (gate := Gate.of(experts)) is not None:
        return gate.apply(_product(experts, name, rows_SD, ends_E), weights_S, bias_EG, ends_E)
    bias = None if bias_EG is None else (bias_EG, rows_SD.new_ones(len(rows_SD)))
    product = _product(experts, name, rows_SD, ends_E, bias)
    activated: Tensor = experts._apply_gate(product) if experts.has_gate else experts.act_fn(product)
    return (activated * weights_S.unsqueeze(1)).to(rows_SD.dtype)


def _product(
    experts: Any, name: str, rows: Tensor, ends_E: Tensor, bias: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the rows times their experts' parameter of this name, with a bias and what its adapters add.

    Args:
        bias: of each expert, [E, outputs], and by what it is multiplied for each row, [S].
    """
    adapters = getattr(experts, ADAPTERS, None) or {}
    # Before the base's product: a recomputed layer computes again until the last saved tensor, which is then the base's
    # parameter, so its product is not computed again.
    added = adapters[name](rows, ends_E) if name in adapters else None
    output: Tensor = _grouped_linear(rows, getattr(experts, name), ends_E, is_transposed=experts.is_transposed)
    if bias is not None:
        # In place, because nothing saves the base's product. Before the sum, after which nothing may round to nearest.
        output.add_(_biases(*bias, ends_E))
    return output if added is None else _sum(output, added)


def _biases(bias_EO: Tensor, weights_S: Tensor, ends_E: Tensor) -> Tensor:
    """Return the bias of each row's expert times the row's weight, [S, O]."""
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
