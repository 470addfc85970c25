"""Attention with sinks: each head has a trained number, which is in the softmax's sum as one more score.

    p_ij = exp(s_ij) / (exp(sink) + sum over k of exp(s_ik))

A token may so attend to nothing (Xiao et al. 2023, arXiv 2309.17453; trained as in gpt-oss, arXiv 2508.10925, section
2.2). The kernels have no sinks, but return the logarithm L_i of each query's sum of scores. With L'_i = log(exp(L_i) +
exp(sink)), the outputs are those of the kernel times exp(L_i - L'_i). The kernel's backward pass computes each p_ij
from the scores and the given logarithm, so with L' and the outputs with sinks it returns the right gradients of
queries, keys and values. That of a sink is the sum over its queries of -exp(sink - L'_i) * (gradient of the output ·
output).

Called by `attention` on CUDA. Suffixes: T tokens of the queries, S of the keys, H query heads, K key heads, D size of a
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# It registers the kernels that are called here.
import torch.nn.attention.varlen  # noqa: F401
from torch import Tensor

__all__ = ["Packing", "attend_with_sinks"]


@dataclass(frozen=True)
class Packing:
    """Where the sequences are: see `torch.nn.attention.varlen.varlen_attn`, whose arguments these are."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_q: int
    longest_k: int
    scale: float | None
    window: tuple[int, int]

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to all tokens before it; else the window says it."""
        return self.window == (-1, 0)


def attend_with_sinks(
    query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, sinks_H: Tensor, packing: Packing
) -> Tensor:
    """Return the attention over packed sequences with a sink for each query head, [T, H, D]."""
    found: Tensor = _Attention.apply(query_THD, key_SKD, value_SKD, sinks_H, packing)  # type: ignore[no-untyped-call]
    return found


class _Attention(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, packing: Packing) -> Tensor:
        output, sums_HT, random = _forward_kernel(query, key, value, packing)
        with_sinks_HT = torch.logaddexp(sums_HT, sinks_H.float().unsqueeze(1))
        # In place, and rounded once: a product of bfloat16 and float32 is computed in float32.
        output = output.mul_((sums_HT - with_sinks_HT).exp_().T.unsqueeze(2))
        ctx.packing = packing
        ctx.save_for_backward(query, key, value, sinks_H, output, with_sinks_HT, random)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outer,) = gradients
        query, key, value, sinks_H, output, sums_HT, random = ctx.saved_tensors
        of_inputs = _backward_kernel(outer, (query, key, value, output, sums_HT, random), ctx.packing)
        of_sinks = None
        if ctx.needs_input_grad[3]:
            products_TH = torch.linalg.vecdot(outer.float(), output.float())
            shares_HT = (sinks_H.float().unsqueeze(1) - sums_HT).exp_()
            of_sinks = -torch.linalg.vecdot(shares_HT, products_TH.T).to(sinks_H.dtype)
        return *of_inputs, of_sinks, None


def _forward_kernel(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [T, H, D], the logarithms of the sums [H, T] in float32, and the random generator's state."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn(
        query,
        key,
        value,
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        packing.longest_q,
        packing.longest_k,
        packing.is_causal,
        packing.scale,
        list(packing.window),
        True,
    )
    return found


def _backward_kernel(outer: Tensor, saved: tuple[Tensor, ...], packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        saved: queries, keys, values, outputs, the logarithms of the sums, and the random generator's state.
    """
    *tensors, random = saved
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        outer.contiguous(),
        *tensors,
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        packing.longest_q,
        packing.longest_k,
        packing.is_causal,
        random,
        packing.scale,
        list(packing.window),
    )
    return found
