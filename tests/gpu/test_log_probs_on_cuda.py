"""The chunked log-probs on a GPU, which has separate kernels for the logits, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ppojob_trainer.maths.log_probs import linear_log_probs, plain_log_probs

pytestmark = pytest.mark.gpu

TOKENS, WIDTH = 1000, 96


def inputs(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, device="cuda").to(dtype)
    weight = (0.3 * torch.randn(vocabulary, WIDTH, generator=generator, device="cuda")).to(dtype)
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=generator, device="cuda")
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def gradients(outputs: tuple[Tensor, Tensor], tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    log_probs, entropy = outputs
    weights = torch.linspace(-1, 2, TOKENS, dtype=log_probs.dtype, device="cuda")
    return torch.autograd.grad((weights * (log_probs + 0.3 * entropy)).sum(), tensors)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocabulary", "chunk"), [(77, 300), (8192, 256), (151_936, None)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 6e-3), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_the_formula(
    vocabulary: int, chunk: int | None, dtype: torch.dtype, limit: float, temperature: float
) -> None:
    hidden, weight, labels = inputs(vocabulary, dtype)
    outputs = linear_log_probs(hidden, weight, labels, temperature, chunk)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    expected = plain_log_probs(exact[0] @ exact[1].t(), labels, temperature)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert torch.allclose(ours.double(), theirs, atol=1e-4, rtol=1e-5)
    pairs = zip(gradients(outputs, (hidden, weight)), gradients(expected, (exact[0], exact[1])), strict=True)
    for ours, theirs in pairs:
        assert float((ours.double() - theirs).norm() / theirs.norm()) < limit


def test_memory_is_that_of_a_chunk() -> None:
    hidden, weight, labels = inputs(151_936, torch.bfloat16)
    hidden = hidden.detach().repeat(8, 1).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs, entropy = linear_log_probs(hidden, weight, labels.repeat(8))
    (log_probs + entropy).sum().backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 8 * TOKENS * 151_936 * 4 * 0.6
