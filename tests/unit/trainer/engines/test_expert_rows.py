"""Rows of tokens in the order of what they chose: which there are, and their sums and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ppojob_trainer.engines.train.fsdp.expert_rows import Rows, collect, spread

# Choices of 2 are left out; the third token has no row, and the last one two of the same key.
KEYS = torch.tensor([[1, 0], [0, 2], [2, 2], [1, 1]])
NUM_ROWS = 5


def test_rows_are_sorted_by_key_and_then_by_token() -> None:
    rows = Rows.sorted_by(KEYS, 2).first(NUM_ROWS)
    assert rows.choices.tolist() == [1, 2, 0, 6, 7]
    assert rows.tokens.tolist() == [0, 1, 0, 3, 3]
    # The first token's first choice is row 2.
    assert rows.of_tokens.tolist() == [2, 0, 1, 3, 4]
    assert rows.starts.tolist() == [0, 2, 3, 3]


@pytest.mark.parametrize("shape", [(0, 2), (3, 2)])
def test_tokens_without_rows_have_sums_of_zero(shape: tuple[int, int]) -> None:
    rows = Rows.sorted_by(torch.full(shape, 2), 2).first(0)
    tokens = torch.ones(shape[0], 4, requires_grad=True)
    found = collect(spread(tokens, rows), rows)
    found.sum().backward()
    assert found.tolist() == [[0.0] * 4] * shape[0]
    assert tokens.grad is not None
    assert not tokens.grad.any()


def test_more_keys_than_16_bits_have() -> None:
    rows = Rows.sorted_by(torch.tensor([[40_000, 70_000], [39_999, 1]]), 70_000).first(3)
    assert rows.choices.tolist() == [3, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_indexing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = Rows.sorted_by(KEYS, 2).first(NUM_ROWS)
    tokens = torch.randn(4, 24).to(dtype).requires_grad_()
    factors = torch.randn(NUM_ROWS, 24).to(dtype)
    outer = torch.randn(4, 24).to(dtype)

    of_rows = spread(tokens, rows)
    found = collect(of_rows * factors, rows)
    (gradient,) = torch.autograd.grad(found, tokens, outer)

    exact = tokens.detach().double().requires_grad_()
    expected = summed(exact[rows.tokens] * factors.double(), rows)
    (expected_gradient,) = torch.autograd.grad(expected, exact, outer.double())
    torch.testing.assert_close(of_rows, tokens[rows.tokens], atol=0, rtol=0)
    # A rounding of each product, and one of the sum.
    tolerance = 3 * torch.finfo(dtype).eps * float((factors.abs().max() * exact.abs().max()).detach()) * 2
    assert found.dtype == gradient.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=tolerance, rtol=0)


def summed(rows_SD: Tensor, rows: Rows) -> Tensor:
    return torch.zeros(len(KEYS), rows_SD.shape[1], dtype=rows_SD.dtype).index_add(0, rows.tokens, rows_SD)


def test_sums_are_rounded_once() -> None:
    """In bfloat16, 1 + 2^-8 + 2^-8 is 1 if each sum is rounded."""
    rows = Rows.sorted_by(torch.zeros(1, 3, dtype=torch.int64), 1)
    found = collect(torch.tensor([[1.0], [2**-8], [2**-8]]).bfloat16(), rows)
    assert found.item() == 1 + 2**-7
