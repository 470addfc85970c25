"""Softmax statistics of logits [C, V] and their gradient in one pass over the memory each, as Triton kernels.

The output layer's matrix products are quick on a GPU; the ten passes over its logits that plain PyTorch makes for
softmax, entropy and gradient are not. The forward kernel is the online softmax of Milakov and Gimelshein 2018
(arXiv 1805.02867), with sum(exp(z) * z) carried along for the entropy. Called by `log_probs` on CUDA; it imports
Triton, which machines without a GPU do not have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STATISTICS_BLOCK = 8192
_GRADIENT_BLOCK = 4096


def statistics(logits_CV: Tensor, labels_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the labels, entropies and logsumexp of logits / temperature, float32 [C].

    Args:
        logits_CV: float32 or bfloat16 [C, V], contiguous, on a GPU.
        labels_C: int64 [C], in [0, V).
    """
    num_rows, num_columns = logits_CV.shape
    found = torch.empty(3, num_rows, dtype=torch.float32, device=logits_CV.device)
    if num_rows:
        _statistics_kernel[(num_rows,)](
            logits_CV, labels_C, found, num_columns, 1.0 / temperature, BLOCK=_STATISTICS_BLOCK, num_warps=16
        )
    log_probs, entropy, log_sum = found.unbind()
    return log_probs, entropy, log_sum


def gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    statistics: tuple[Tensor, Tensor],
    outer: tuple[Tensor, Tensor | None],
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient [C, V] by the logits, in `dtype`.

    With z = logits / temperature: dz = g (onehot - p) - h p (log p + H).

    Args:
        statistics: logsumexp and entropies H, float32 [C].
        outer: the gradients g by the log-probs and h by the entropies (None: 0), float32 [C].
    """
    num_rows, num_columns = logits_CV.shape
    grad = torch.empty(num_rows, num_columns, dtype=dtype, device=logits_CV.device)
    grad_log_probs, grad_entropy = outer
    rows = (*statistics, grad_log_probs, torch.zeros_like(grad_log_probs) if grad_entropy is None else grad_entropy)
    if num_rows:
        _gradient_kernel[(num_rows, triton.cdiv(num_columns, _GRADIENT_BLOCK))](
            logits_CV,
            labels_C,
            torch.stack(rows),
            grad,
            num_columns,
            1.0 / temperature,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=8,
        )
    return grad


@triton.jit
def _statistics_kernel(logits, labels, found, num_columns, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    base = logits + row * num_columns
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        z = tl.load(base + columns, mask=inside, other=-float("inf")).to(tl.float32) * inverse_temperature
        peak = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(largest - peak)
        e = tl.exp(z - peak)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, e * z, 0.0), 0)
        largest = peak
    log_sum = largest + tl.log(total)
    z_label = tl.load(base + tl.load(labels + row)).to(tl.float32) * inverse_temperature
    tl.store(found + row, z_label - log_sum)
    tl.store(found + num_rows + row, log_sum - weighted / total)
    tl.store(found + 2 * num_rows + row, log_sum)


@triton.jit
def _gradient_kernel(logits, labels, rows, grad, num_columns, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    log_sum = tl.load(rows + row)
    entropy = tl.load(rows + num_rows + row)
    outer_log_prob = tl.load(rows + 2 * num_rows + row)
    outer_entropy = tl.load(rows + 3 * num_rows + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    z = tl.load(logits + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    log_p = z - log_sum
    p = tl.exp(log_p)
    onehot = tl.where(columns == tl.load(labels + row), 1.0, 0.0)
    found = outer_log_prob * (onehot - p) - outer_entropy * p * (log_p + entropy)
    found = found * inverse_temperature
    tl.store(grad + row * num_columns + columns, found.to(grad.dtype.element_ty), mask=inside)
