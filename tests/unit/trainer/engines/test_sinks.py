"""Attention with sinks: on the processor, and the gradients on GPUs with kernels in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ppojob_trainer.engines.train.batch import Segments
from ppojob_trainer.engines.train.fsdp import sinks
from ppojob_trainer.engines.train.fsdp.attention import packed_attention
from ppojob_trainer.engines.train.fsdp.sinks import Packing, attend_with_sinks

LENGTHS, HEADS, KEY_HEADS, SIZE, VALUES = (3, 9, 5), 4, 2, 8, 6
SCALE = 0.3


def scores_of(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return the scores [H, T, T] of the packed tokens, -inf where a token does not attend."""
    ends = torch.tensor(LENGTHS).cumsum(0)
    place = torch.arange(sum(LENGTHS))
    sequence = torch.bucketize(place, ends, right=True)
    distance = place.unsqueeze(1) - place.unsqueeze(0)
    attends = (sequence.unsqueeze(1) == sequence.unsqueeze(0)) & (distance >= 0)
    if window is not None:
        attends &= distance < window
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (torch.einsum("thd,shd->hts", query, key) * SCALE).masked_fill(~attends, -torch.inf)


def expected(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, window: int | None) -> Tensor:
    """The softmax of scores and sink, as transformers' gpt-oss computes it."""
    scores = scores_of(query, key, window)
    column = sinks_H.view(-1, 1, 1).expand(*scores.shape[:2], 1)
    shares = torch.cat([scores, column], dim=2).softmax(dim=2)[..., :-1]
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return torch.einsum("hts,shd->thd", shares, value)


def drawn(dtype: torch.dtype, value_size: int = SIZE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and sinks."""
    torch.manual_seed(3)

    def one(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    num_tokens = sum(LENGTHS)
    queries, keys = one(num_tokens, HEADS, SIZE), one(num_tokens, KEY_HEADS, SIZE)
    return queries, keys, one(num_tokens, KEY_HEADS, value_size), one(HEADS)


def plain_forward(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes: outputs and logarithms of sums, without sinks."""
    scores = scores_of(query, key, window_of(packing))
    value = value.repeat_interleave(HEADS // KEY_HEADS, dim=1)
    sums = scores.logsumexp(2)
    return torch.einsum("hts,shd->thd", (scores - sums.unsqueeze(2)).exp(), value), sums, torch.zeros(2)


def plain_backward(outer: Tensor, saved: tuple[Tensor, ...], packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes: gradients, with the given outputs and logarithms of sums."""
    query, key, value, output, sums, _ = saved
    shares = (scores_of(query, key, window_of(packing)) - sums.unsqueeze(2)).exp()
    times = HEADS // KEY_HEADS
    wide_key, wide_value = (one.repeat_interleave(times, dim=1) for one in (key, value))
    products = torch.linalg.vecdot(outer, output).T.unsqueeze(2)
    of_scores = shares * (torch.einsum("thd,shd->hts", outer, wide_value) - products) * SCALE
    of_key, of_value = torch.einsum("hts,thd->shd", of_scores, query), torch.einsum("hts,thd->shd", shares, outer)
    narrow = [one.unflatten(1, (KEY_HEADS, times)).sum(2) for one in (of_key, of_value)]
    return torch.einsum("hts,shd->thd", of_scores, wide_key), narrow[0], narrow[1]


def window_of(packing: Packing) -> int | None:
    return None if packing.is_causal else packing.window[0] + 1


@pytest.mark.parametrize("window", [None, 2])
def test_the_gradients_are_those_of_one_more_score(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(sinks, "_forward_kernel", plain_forward)
    monkeypatch.setattr(sinks, "_backward_kernel", plain_backward)
    inputs = drawn(torch.float32)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packing = Packing(starts, starts, 9, 9, SCALE, (-1 if window is None else window - 1, 0))
    outer = torch.randn(sum(LENGTHS), HEADS, SIZE)

    found, right = attend_with_sinks(*inputs, packing), expected(*inputs, window)

    torch.testing.assert_close(found, right)
    gradients = zip(torch.autograd.grad(found, inputs, outer), torch.autograd.grad(right, inputs, outer), strict=True)
    for ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 2])
def test_the_processor_computes_one_more_score(window: int | None) -> None:
    inputs = drawn(torch.float64, VALUES)
    *of_tokens, sinks_H = inputs
    segments = Segments(torch.tensor([0, *LENGTHS]).cumsum(0).int(), LENGTHS)
    options: dict[str, Any] = {"scaling": SCALE, "sliding_window": window, "s_aux": sinks_H}

    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in of_tokens)
    found, _ = packed_attention(torch.nn.Module(), query, key, value, None, segments=segments, **options)
    right = expected(*inputs, window)

    torch.testing.assert_close(found[0], right)
    outer = torch.randn_like(right)
    gradients = zip(
        torch.autograd.grad(found[0], inputs, outer), torch.autograd.grad(right, inputs, outer), strict=True
    )
    for ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs)
