"""Masked statistics against the same statistics of the selected entries alone."""

import math

import pytest
import torch

from ppojob_trainer.maths.masked import (
    Moments,
    explained_variance,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    whiten,
)

VALUES = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
CHOSEN = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def test_sum_and_mean_by_hand() -> None:
    assert masked_sum(VALUES, MASK).item() == 7
    assert masked_mean(VALUES, MASK).item() == pytest.approx(7 / 3)
    assert masked_mean(VALUES, MASK, dim=1).tolist() == [1.5, 4.0]


@pytest.mark.parametrize("unbiased", [True, False])
def test_variance_is_that_of_the_chosen(unbiased: bool) -> None:
    expected = CHOSEN.var(unbiased=unbiased).item()
    assert masked_var(VALUES, MASK, unbiased).item() == pytest.approx(expected)


def test_what_the_mask_hides_may_be_anything() -> None:
    hidden = torch.where(MASK.bool(), VALUES, torch.tensor(math.nan, dtype=torch.float64)).requires_grad_()
    masked_mean(hidden, MASK).backward()
    assert masked_mean(hidden, MASK).item() == pytest.approx(7 / 3)
    assert torch.allclose(hidden.grad, MASK.double() / 3)  # type: ignore[arg-type]
    assert masked_whiten(hidden.detach(), MASK).isfinite().all()


def test_nothing_selected_is_zero() -> None:
    nothing = torch.zeros_like(MASK)
    assert masked_mean(VALUES, nothing).item() == 0
    assert masked_var(VALUES, nothing).item() == 0
    assert masked_whiten(VALUES, nothing).abs().sum().item() == 0


def test_whitening_by_hand() -> None:
    expected = (CHOSEN - CHOSEN.mean()) / CHOSEN.std()
    whitened = masked_whiten(VALUES, MASK)
    assert torch.allclose(whitened[MASK.bool()], expected)
    assert (whitened[~MASK.bool()] == 0).all()
    kept = masked_whiten(VALUES, MASK, shift_mean=False)
    assert torch.allclose(kept[MASK.bool()], expected + CHOSEN.mean())


def test_sharded_whitening_equals_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, generator=generator) * 3 + 100
    mask = torch.rand(6, 5, generator=generator) < 0.6
    shards = list(zip(values.chunk(3), mask.chunk(3), strict=True))
    # What an all-reduce does.
    summed = torch.stack([Moments.of(*shard).to_tensor() for shard in shards]).sum(dim=0)
    moments = Moments.from_tensor(summed)
    pieces = torch.cat([whiten(*shard, moments) for shard in shards])
    assert torch.allclose(pieces, masked_whiten(values, mask), atol=1e-5)
    assert moments == pytest.approx(sum((Moments.of(*shard) for shard in shards[1:]), Moments.of(*shards[0])))
    chosen = pieces[mask].double()
    assert chosen.mean().item() == pytest.approx(0, abs=1e-4)
    assert chosen.var().item() == pytest.approx(1, abs=1e-3)


def test_equal_entries_do_not_blow_up() -> None:
    values = torch.full((4, 4), 0.1)
    assert masked_whiten(values, torch.ones(4, 4)).abs().max() < 1e-3
    assert Moments.of(values, torch.ones(4, 4)).variance == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("returns", "values", "expected"),
    [([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0), ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 0.0), ([5.0, 5.0], [1.0, 2.0], 0.0)],
)
def test_explained_variance(returns, values, expected) -> None:
    returns, values = torch.tensor(returns), torch.tensor(values)
    ones = torch.ones_like(returns)
    assert explained_variance(Moments.of(returns, ones), Moments.of(returns - values, ones)) == pytest.approx(expected)
