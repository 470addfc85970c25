"""Attention over packed sequences equals attention over each of them, and over all with a block-diagonal mask."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ppojob_trainer.engines.train.batch import Segments
from ppojob_trainer.engines.train.fsdp.attention import packed_attention

LENGTHS = (5, 1, 8)


@pytest.fixture
def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    query = torch.randn(1, 4, total, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, total, 16, generator=generator)
    return query, key, value


def segments() -> Segments:
    return Segments(torch.tensor([0, 5, 6, 14], dtype=torch.int32), LENGTHS)


def test_it_equals_one_attention_with_a_block_diagonal_mask(heads: tuple[torch.Tensor, ...]) -> None:
    query, key, value = heads
    output, weights = packed_attention(nn.Identity(), query, key, value, None, segments=segments(), scaling=0.3)
    mask = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS)).bool()
    expected = functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1), attn_mask=mask, scale=0.3
    )
    assert weights is None
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_a_window_hides_what_is_too_far_back(heads: tuple[torch.Tensor, ...]) -> None:
    query, key, value = heads
    output, _ = packed_attention(nn.Identity(), query, key, value, None, segments=segments(), sliding_window=1)
    # A token that sees only itself takes its own value.
    torch.testing.assert_close(output, value.repeat_interleave(2, dim=1).transpose(1, 2))


def test_a_window_longer_than_the_sequences_changes_nothing(heads: tuple[torch.Tensor, ...]) -> None:
    query, key, value = heads
    windowed, _ = packed_attention(nn.Identity(), query, key, value, None, segments=segments(), sliding_window=8)
    plain, _ = packed_attention(nn.Identity(), query, key, value, None, segments=segments())
    assert torch.equal(windowed, plain)


def test_dropout_is_refused(heads: tuple[torch.Tensor, ...]) -> None:
    query, key, value = heads
    with pytest.raises(ValueError, match=r"dropout 0\.1 is not supported"):
        packed_attention(nn.Identity(), query, key, value, None, segments=segments(), dropout=0.1)
