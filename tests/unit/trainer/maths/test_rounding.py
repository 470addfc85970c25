"""Stochastic rounding keeps small changes on average and what bfloat16 has, and equal inputs give equal bytes."""

from __future__ import annotations

import pytest
import torch

from ppojob_trainer.maths import rounding
from ppojob_trainer.maths.rounding import round_stochastically


def bfloat16_weights(*shape: int) -> torch.Tensor:
    return (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))).bfloat16().float()


@pytest.mark.parametrize("size", [1e-7, 3e-6, 1e-5, -3e-6])
def test_the_mean_has_the_change_and_that_of_the_nearest_numbers_does_not(size: float) -> None:
    weights = bfloat16_weights(2048, 1024)
    # Each by another number, as adapters do.
    change = size * (2 * torch.rand(weights.shape, generator=torch.Generator().manual_seed(2)))

    rounded = round_stochastically(weights + change, torch.bfloat16).float()

    nearest = (weights + change).bfloat16().float()
    assert float((rounded - weights).double().mean()) == pytest.approx(float(change.mean()), rel=0.1)
    assert abs(float((nearest - weights).double().mean())) < 0.5 * abs(float(change.mean()))


def test_each_number_becomes_one_of_its_neighbours() -> None:
    values = bfloat16_weights(1000) + torch.linspace(-1e-4, 1e-4, 1000)

    rounded = round_stochastically(values, torch.bfloat16)

    bits = values.view(torch.int32)
    lower = (bits & ~0xFFFF).view(torch.float32)
    upper = ((bits & ~0xFFFF) + 0x10000).view(torch.float32)
    assert rounded.dtype is torch.bfloat16
    assert torch.all((rounded.float() == lower) | (rounded.float() == upper))
    assert 0.2 < float((rounded.float() == upper).float().mean()) < 0.8


def test_what_bfloat16_has_stays() -> None:
    infinite = float("inf")
    # The bits of a GPU's NaN, and the largest and the smallest numbers.
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([0.0, -0.0, infinite, -infinite, 3.3895e38, -3.3895e38]).bfloat16().float()
    values = torch.cat([bfloat16_weights(500), ends])

    assert torch.equal(round_stochastically(values, torch.bfloat16).float(), values)
    assert round_stochastically(nan, torch.bfloat16).isnan().all()


def test_a_number_gives_the_same_bits_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    values = bfloat16_weights(70, 30) + 1e-5
    whole = round_stochastically(values, torch.bfloat16)

    assert torch.equal(round_stochastically(values.T, torch.bfloat16), whole.T)
    assert torch.equal(round_stochastically(values[3, 5:9], torch.bfloat16), whole[3, 5:9])
    monkeypatch.setattr(rounding, "_AT_A_TIME", 101)
    assert torch.equal(round_stochastically(values, torch.bfloat16), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_get_the_nearest_numbers(dtype: torch.dtype) -> None:
    values = bfloat16_weights(100) + 1e-5

    assert torch.equal(round_stochastically(values, dtype), values.to(dtype))
