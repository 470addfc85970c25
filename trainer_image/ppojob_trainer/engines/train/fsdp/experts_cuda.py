"""Copies and sums of rows, sums with adapters and the gate of experts, as Triton kernels that pass the memory once.

Between two grouped products, plain PyTorch reads and writes the rows of all experts a dozen times, which takes longer
than the products. Called by `expert_rows`, `grouped_experts` and `expert_gates` on CUDA; it imports Triton, which
machines without a GPU do not have.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 2048
_GATE_BLOCK = 1024
"""Half as large, because gate and up are beside each other."""

GateNumbers: TypeAlias = tuple[bool, float, float, float]
"""The fields of `expert_gates.Gate`."""


class _Biases(NamedTuple):
    """As the kernels get them."""

    bias_EG: Tensor | None
    ends_E: Tensor
    num_experts: int


class _Gradients(NamedTuple):
    products_SG: Tensor
    weights_S: Tensor


class _Gate(NamedTuple):
    """experts_block: the number of experts or more, a power of 2."""

    alternates: bool
    alpha: float
    limit: float
    shift: float
    experts_block: int


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


def gate(products_SG: Tensor, weights_S: Tensor, bias_EG: Tensor | None, ends_E: Tensor, gate: GateNumbers) -> Tensor:
    """Return the gated rows times their weights, [S, I], in the dtype of `products_SG`: see `expert_gates`.

    Args:
        products_SG: float32 or bfloat16 [S, 2 I], contiguous; weights_S: float32 or bfloat16, contiguous.
        bias_EG: float32 or bfloat16 [E, 2 I], contiguous, or None; ends_E: int32.
    """
    size = products_SG.shape[1] // 2
    found = products_SG.new_empty(len(products_SG), size)
    if found.numel():
        biases = _Biases(bias_EG, ends_E, len(ends_E))
        options = _gate_options(size, biases, gate)
        grid = (len(products_SG), triton.cdiv(size, options["BLOCK"]))
        _gate_kernel[grid](products_SG, weights_S, biases, found, size, **options)
    return found


def gate_gradients(
    products_SG: Tensor,
    weights_S: Tensor,
    bias_EG: Tensor | None,
    ends_E: Tensor,
    gate: GateNumbers,
    outer_SI: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients by the products [S, 2 I] and by the weights [S]; `outer_SI` is that by the result."""
    size = products_SG.shape[1] // 2
    grad, grad_weights = torch.empty_like(products_SG), torch.empty_like(weights_S)
    if grad.numel():
        biases = _Biases(bias_EG, ends_E, len(ends_E))
        options = _gate_options(size, biases, gate)
        grads = _Gradients(grad, grad_weights)
        _gate_gradients_kernel[(len(products_SG),)](products_SG, weights_S, biases, outer_SI, grads, size, **options)
    return grad, grad_weights


def _gate_options(size: int, biases: _Biases, gate: GateNumbers) -> dict[str, Any]:
    assert biases.bias_EG is None or biases.bias_EG.is_contiguous()
    experts = 1 if biases.bias_EG is None else triton.next_power_of_2(biases.num_experts)
    return {"GATE": _Gate(*gate, experts), "BLOCK": min(triton.next_power_of_2(size), _GATE_BLOCK), "num_warps": 4}


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
def _gate_kernel(products, weights, biases, found, size, GATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    gate, up = _load_gate_and_up(products + row * 2 * size, start, size, GATE, BLOCK)
    if biases.bias_EG is not None:
        gate_bias, up_bias = _load_gate_and_up(_bias_address(biases, row, size, GATE), start, size, GATE, BLOCK)
        gate += gate_bias
        up += up_bias
    # Not `minimum`, which makes a number of NaN.
    gate = tl.where(gate > GATE.limit, GATE.limit, gate)
    up = tl.where(up > GATE.limit, GATE.limit, tl.where(up < -GATE.limit, -GATE.limit, up)) + GATE.shift
    result = gate / (1.0 + tl.exp(-GATE.alpha * gate)) * up * tl.load(weights + row).to(tl.float32)
    columns = start + tl.arange(0, BLOCK)
    tl.store(found + row * size + columns, result.to(found.dtype.element_ty), mask=columns < size)


@triton.jit
def _gate_gradients_kernel(products, weights, biases, outer, grads, size, GATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    bias = products
    if biases.bias_EG is not None:
        bias = _bias_address(biases, row, size, GATE)
    by_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        gate, up = _load_gate_and_up(products + row * 2 * size, start, size, GATE, BLOCK)
        if biases.bias_EG is not None:
            gate_bias, up_bias = _load_gate_and_up(bias, start, size, GATE, BLOCK)
            gate += gate_bias
            up += up_bias
        is_gate_cut = gate > GATE.limit
        is_up_cut = (up > GATE.limit) | (up < -GATE.limit)
        gate = tl.where(is_gate_cut, GATE.limit, gate)
        up = tl.where(up > GATE.limit, GATE.limit, tl.where(up < -GATE.limit, -GATE.limit, up)) + GATE.shift
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        above = tl.load(outer + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-GATE.alpha * gate))
        gated = gate * share
        by_weight += above * gated * up
        above = above * weight
        by_gate = tl.where(is_gate_cut, 0.0, above * up * share * (1.0 + GATE.alpha * (gate - gated)))
        by_up = tl.where(is_up_cut, 0.0, above * gated)
        into = grads.products_SG + row * 2 * size
        if GATE.alternates:
            both = 2 * start + tl.arange(0, 2 * BLOCK)
            tl.store(into + both, tl.interleave(by_gate, by_up).to(into.dtype.element_ty), mask=both < 2 * size)
        else:
            tl.store(into + columns, by_gate.to(into.dtype.element_ty), mask=inside)
            tl.store(into + size + columns, by_up.to(into.dtype.element_ty), mask=inside)
    tl.store(grads.weights_S + row, tl.sum(by_weight, 0).to(grads.weights_S.dtype.element_ty))


@triton.jit
def _bias_address(biases, row, size, GATE: tl.constexpr):
    """Return where the bias of the row's expert begins: as many experts end before the row."""
    experts = tl.arange(0, GATE.experts_block)
    exists = experts < biases.num_experts
    has_ended = exists & (tl.load(biases.ends_E + experts, mask=exists, other=0) <= row)
    return biases.bias_EG + tl.sum(has_ended.to(tl.int64), 0) * 2 * size


@triton.jit
def _load_gate_and_up(first, start, size, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the columns of gate and up from `start`, in float32."""
    if GATE.alternates:
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        loaded = tl.load(first + both, mask=both < 2 * size, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(loaded, [BLOCK, 2]))
    else:
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        gate = tl.load(first + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(first + size + columns, mask=inside, other=0.0).to(tl.float32)
    return gate, up
