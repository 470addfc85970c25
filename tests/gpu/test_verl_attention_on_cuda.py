"""The attention that the benchmark gives verl: packed sequences, as flash-attn's Python code asks for them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.bench.verl_attention import flash_attn_2_cuda

pytestmark = pytest.mark.gpu

LENGTHS, HEADS, KEY_HEADS, SIZE = (5, 300, 64), 8, 2, 64
SCALE = SIZE**-0.5


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of each sequence, in the inputs' precision."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    found = []
    for start, end in pairwise(ends):
        query, key, value = (one[start:end].transpose(0, 1).unsqueeze(0) for one in (q, k, v))
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        found.append(output[0].transpose(0, 1))
    return torch.cat(found)


def test_outputs_and_gradients_are_those_of_attention_in_float32() -> None:
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    d_out = torch.randn_like(q)
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    longest = (max(LENGTHS), max(LENGTHS))
    settings = (0.0, SCALE, False, True, -1, -1, 0.0)

    out, sums, _, random = flash_attn_2_cuda.varlen_fwd(
        q, k, v, None, starts, starts, None, None, None, None, *longest, *settings, False, None
    )
    gradients = [torch.empty_like(one) for one in (q, k, v)]
    flash_attn_2_cuda.varlen_bwd(
        d_out, q, k, v, out, sums, *gradients, starts, starts, None, *longest, *settings, False, None, random
    )

    inputs = query, key, value = [one.float().requires_grad_() for one in (q, k, v)]
    expected = exact(query, key, value)
    wanted = (expected, *torch.autograd.grad(expected, inputs, d_out.float()))
    for found, right in zip((out, *gradients), wanted, strict=True):
        torch.testing.assert_close(found.float(), right, rtol=0.02, atol=0.01 * float(right.detach().abs().max()))
