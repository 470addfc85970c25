"""Copies and sums of rows, sums with adapters and the gate of experts, as Triton kernels that pass the memory once.

Between two grouped products, plain PyTorch reads and writes the rows of all experts a dozen times, which takes longer
than the products. Called by `expert_rows` and `grouped_experts` on CUDA; it imports Triton, which machines without a
GPU do not have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 2048


def take(tokens_TD: Tensor, tokens: Tensor) -> Tensor:
    """Return the tokens [S, D] at these places.

    Args:
        tokens_TD: float32 or bfloat16 [T, D], contiguous.
        tokens: int64 [S].
    """
    num_rows, size = len(tokens), tokens_TD.shape[1]
    found = tokens_TD.new_empty(num_rows, size)
    if found.numel():
        block = min(triton.next_power_of_2(size), _LARGEST_BLOCK)
        _take_kernel[(num_rows, triton.cdiv(size, block))](tokens_TD, tokens, found, size, BLOCK=block, num_warps=4)
    return found


def sums(rows_SD: Tensor, of_tokens: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of each token's rows [T, D], added in float32 and rounded to the dtype of the rows.

    Args:
        rows_SD: float32 or bfloat16 [S, D], contiguous.
        of_tokens: the rows in the order of their tokens, int64 [S].
        starts: of each token, its first place in `of_tokens`, int64 [T].
    """
    num_tokens, size = len(starts), rows_SD.shape[1]
    found = rows_SD.new_empty(num_tokens, size)
    if found.numel():
        block = min(triton.next_power_of_2(size), _LARGEST_BLOCK)
        _sums_kernel[(num_tokens, triton.cdiv(size, block))](
            rows_SD, of_tokens, starts, found, len(of_tokens), size, BLOCK=block, num_warps=4
        )
    return found


def gate(both_SI: Tensor, weights_S: Tensor) -> Tensor:
    """Return silu(gate) * up * weight [S, I], in the dtype of `both_SI`.

    Args:
        both_SI: gate and up side by side, float32 or bfloat16 [S, 2 * I], contiguous.
        weights_S: float32 or bfloat16 [S], contiguous.
    """
    size = both_SI.shape[1] // 2
    found = both_SI.new_empty(len(both_SI), size)
    if found.numel():
        block = triton.next_power_of_2(size)
        _gate_kernel[(len(both_SI),)](both_SI, weights_S, found, size, BLOCK=block, num_warps=4)
    return found


def gate_gradients(both_SI: Tensor, weights_S: Tensor, outer_SI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients by gate and up [S, 2 * I], and by the weights [S]; `outer_SI` is that by the result."""
    size = both_SI.shape[1] // 2
    grad, grad_weights = torch.empty_like(both_SI), torch.empty_like(weights_S)
    if grad.numel():
        block = triton.next_power_of_2(size)
        _gate_gradients_kernel[(len(both_SI),)](
            both_SI, weights_S, outer_SI, grad, grad_weights, size, BLOCK=block, num_warps=4
        )
    return grad, grad_weights


def add(into: Tensor, added: Tensor) -> None:
    """Add a tensor to another one and round the sums as `maths.rounding` does.

    Args:
        into, added: bfloat16, contiguous.
    """
    if number := into.numel():
        _add_kernel[(triton.cdiv(number, _LARGEST_BLOCK),)](into, added, number, BLOCK=_LARGEST_BLOCK, num_warps=4)


@triton.jit
def _take_kernel(tokens_of, tokens, found, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    token = tl.load(tokens + row)
    tl.store(found + row * size + columns, tl.load(tokens_of + token * size + columns, mask=inside), mask=inside)


@triton.jit
def _sums_kernel(rows, of_tokens, starts, found, num_rows, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    is_last = token == tl.num_programs(0) - 1
    begin = tl.load(starts + token)
    end = tl.load(starts + token + 1, mask=is_last == 0, other=num_rows)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(begin, end):
        row = tl.load(of_tokens + place)
        total += tl.load(rows + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + token * size + columns, total.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(into, added, number, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    inside = lanes < number - block
    total = tl.load(into + block + lanes, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(added + block + lanes, mask=inside, other=0.0).to(tl.float32)
    bits = total.to(tl.uint32, bitcast=True)
    # Wellons' hash `lowbias32`.
    random = (bits ^ (bits >> 16)) * 0x7FEB352D
    random = (random ^ (random >> 15)) * 0x846CA68B
    random = (random ^ (random >> 16)) & 0xFFFF
    rounded = ((bits + random) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    tl.store(into + block + lanes, tl.where(is_finite, rounded, total.to(tl.bfloat16)), mask=inside)


@triton.jit
def _gate_kernel(both, weights, found, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(both + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up * weight
    tl.store(found + row * size + columns, result.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _gate_gradients_kernel(both, weights, outer, grad, grad_weights, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(both + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(outer + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * share
    by_weight = tl.sum(above * silu * up, 0)
    above = above * weight
    by_gate = above * up * share * (1.0 + gate - silu)
    by_up = above * silu
    tl.store(grad + row * 2 * size + columns, by_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(grad + row * 2 * size + size + columns, by_up.to(grad.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row, by_weight.to(grad_weights.dtype.element_ty))
