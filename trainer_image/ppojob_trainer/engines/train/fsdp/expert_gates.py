"""The gate between both products of the experts: bias, gate and the rows' weights in one pass over the rows.

    products [S, 2 I] ─ + bias of the row's expert ─▶ gate, up ─▶  g * sigmoid(alpha * g) * (u + shift) * weight  [S, I]
                                                                   g = min(gate, limit), u = up within ±limit

With the defaults, this is silu(gate) * up (Shazeer 2020, arXiv 2002.05202); with its own numbers, it is gpt-oss's gate
(arXiv 2508.10925), as transformers and vLLM compute it. Called by `grouped_experts`. On CUDA, the kernels of
`experts_cuda` compute it; plain PyTorch reads and writes all rows a dozen times.

Suffixes: S rows, sorted by expert; I size of an expert's hidden layer, G = 2 I that of gate and up together, E experts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ppojob_trainer.engines.train.fsdp.expert_rows import kernels
from ppojob_trainer.engines.train.fsdp.grouped_products import ALIGNED, weight_gradient

__all__ = ["Gate"]


class Gate(NamedTuple):
    """Which gate it is. The names are those of the formula above; the kernels get these four in this order.

    alternates: whether gate and up take turns in a row, instead of one after the other.
    """

    alternates: bool = False
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    @classmethod
    def of(cls, experts: Any) -> Gate | None:
        """Return the gate of transformers' experts; None: they have none, or another one."""
        function = getattr(experts._apply_gate, "__func__", None) if experts.has_gate else None
        if function is GptOssExperts._apply_gate:
            return cls(alternates=True, alpha=experts.alpha, limit=experts.limit, shift=1.0)
        is_silu = function is _default_apply_gate and isinstance(experts.act_fn, SiLUActivation | nn.SiLU)
        return cls() if is_silu else None

    def apply(self, products_SG: Tensor, weights_S: Tensor, bias_EG: Tensor | None, ends_E: Tensor) -> Tensor:
        """Return the gated rows times their weights, [S, I], in the dtype of the products.

        The backward pass needs these arguments alone.

        Args:
            products_SG: of gate and up, [S, 2 I]; weights_S: float32 or as the products.
            bias_EG: [E, 2 I] in the dtype of the products; None: there is none.
            ends_E: after which row the rows of each expert end, int32.
        """
        found: Tensor = _Gated.apply(products_SG, weights_S, bias_EG, ends_E, self)  # type: ignore[no-untyped-call]
        return found

    def divide(self, both_SG: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of gate and up, [S, I]."""
        if self.alternates:
            return both_SG[:, ::2], both_SG[:, 1::2]
        size = both_SG.shape[1] // 2
        return both_SG[:, :size], both_SG[:, size:]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, products_SG: Tensor, weights_S: Tensor, bias_EG: Tensor | None, ends_E: Tensor, gate: Gate
    ) -> Tensor:
        products_SG = products_SG.contiguous()
        ctx.save_for_backward(products_SG, weights_S, bias_EG, ends_E)
        ctx.gate = gate
        if (found := kernels(products_SG)) is None:
            return _gated(products_SG, weights_S, bias_EG, ends_E, gate)
        result: Tensor = found.gate(products_SG, weights_S, bias_EG, ends_E, gate)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        products_SG, weights_S, bias_EG, ends_E = ctx.saved_tensors
        outer = gradients[0].contiguous()
        given, gate = (products_SG, weights_S, bias_EG, ends_E), ctx.gate
        if (found := kernels(products_SG)) is None:
            of_products, of_weights = _gradients(*given, gate, outer)
        else:
            of_products, of_weights = found.gate_gradients(*given, gate, outer)
        of_bias = None
        if ctx.needs_input_grad[2]:
            # A sum of each expert's rows: a product with ones.
            ones = of_products.new_ones(len(of_products), ALIGNED)
            of_bias = weight_gradient(ones, of_products, ends_E)[:, 0]
        return of_products, of_weights, of_bias, None, None


def _gated(products_SG: Tensor, weights_S: Tensor, bias_EG: Tensor | None, ends_E: Tensor, gate: Gate) -> Tensor:
    dtype = products_SG.dtype
    # As the kernels, which round the result alone.
    both_SG = products_SG.float() if dtype is torch.bfloat16 else products_SG
    if bias_EG is not None:
        rows = torch.arange(len(both_SG), device=ends_E.device, dtype=ends_E.dtype)
        both_SG = both_SG + bias_EG[torch.searchsorted(ends_E, rows, right=True)]
    gated, up = gate.divide(both_SG)
    if gate.limit < math.inf:
        gated, up = gated.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    gated = functional.silu(gated) if gate.alpha == 1 else gated * torch.sigmoid(gate.alpha * gated)
    return (gated * (up + gate.shift) * weights_S.unsqueeze(1)).to(dtype)


def _gradients(
    products_SG: Tensor, weights_S: Tensor, bias_EG: Tensor | None, ends_E: Tensor, gate: Gate, outer_SI: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients by the products and by the weights; `outer_SI` is that by the result."""
    with torch.enable_grad():
        given = products_SG.detach().requires_grad_(), weights_S.detach().requires_grad_()
        gated_SI = _gated(*given, bias_EG, ends_E, gate)
    return torch.autograd.grad(gated_SI, given, outer_SI)
