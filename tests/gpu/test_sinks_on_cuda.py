"""Attention with sinks by torch's kernels, in bfloat16, beside plain PyTorch in float32: outputs and gradients."""

from __future__ import annotations

import pytest
import torch

from ppojob_trainer.engines.train.fsdp.sinks import Packing, attend_with_sinks
from tests.unit.trainer.engines.test_sinks import HEADS, KEY_HEADS, LENGTHS, SCALE, expected

pytestmark = pytest.mark.gpu

# Of gpt-oss.
SIZE = 64


@pytest.mark.parametrize("window", [None, 2])
def test_outputs_and_gradients_are_those_of_one_more_score(window: int | None) -> None:
    torch.manual_seed(3)
    shapes = [(sum(LENGTHS), heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    inputs = [torch.randn(shape).bfloat16() for shape in (*shapes, (HEADS,))]
    outer = torch.randn(shapes[0]).bfloat16()
    on_gpu = [one.cuda().requires_grad_() for one in inputs]
    exact = [one.float().requires_grad_() for one in inputs]
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    longest = max(LENGTHS)
    packing = Packing(starts, starts, longest, longest, SCALE, (-1 if window is None else window - 1, 0))

    (query, key, value, sinks), (exact_query, exact_key, exact_value, exact_sinks) = on_gpu, exact
    found = attend_with_sinks(query, key, value, sinks, packing)
    right = expected(exact_query, exact_key, exact_value, exact_sinks, window)

    gradients = torch.autograd.grad(found, on_gpu, outer.cuda()), torch.autograd.grad(right, exact, outer.float())
    for ours, theirs in zip((found, *gradients[0]), (right, *gradients[1]), strict=True):
        limit = 0.02 * float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.detach().float().cpu(), theirs.detach(), rtol=0.02, atol=limit)
