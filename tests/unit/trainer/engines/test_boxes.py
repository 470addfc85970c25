"""Boxes of tensors, and the sums that show whether a box has the right numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppojob_trainer.engines.weights import sums
from ppojob_trainer.engines.weights.boxes import Box, box_of, inside, merged, whole_box
from ppojob_trainer.engines.weights.sums import agree, num_sums, sums_of


@pytest.mark.parametrize(
    ("shape", "view", "expected"),
    [
        ((8, 6), lambda x: x, ((0, 8), (0, 6))),
        ((8, 6), lambda x: x.narrow(0, 2, 4), ((2, 6), (0, 6))),
        ((8, 6), lambda x: x.narrow(1, 3, 3), ((0, 8), (3, 6))),
        ((8, 6), lambda x: x[3:5, 1:2].t(), ((3, 5), (1, 2))),
        ((8, 6), lambda x: x[7], ((7, 8), (0, 6))),
        ((8, 6), lambda x: x.view(-1), ((0, 8), (0, 6))),
        ((3, 4, 2), lambda x: x[1].narrow(0, 2, 2), ((1, 2), (2, 4), (0, 2))),
        ((3, 4, 2), lambda x: x.chunk(2, dim=1)[1].transpose(1, 2), ((0, 3), (2, 4), (0, 2))),
        ((4, 1, 2), lambda x: x[1:3], ((1, 3), (0, 1), (0, 2))),
        ((8,), lambda x: x[4:], ((4, 8),)),
        ((), lambda x: x, ()),
        ((8, 6), lambda x: x[::2], None),
        ((8, 6), lambda x: x.view(4, 12)[1:3], None),
        ((8, 6), lambda x: x.view(-1)[3:9], None),
    ],
)
def test_a_view_is_known_by_its_strides(
    shape: tuple[int, ...], view: Callable[[Tensor], Tensor], expected: Box | None
) -> None:
    whole = torch.zeros(shape)
    part = view(whole)
    box = box_of(part, shape, int(part.storage_offset()))
    assert box == expected
    if box is not None:
        inside(whole, box).fill_(1)
        assert part.sum() == whole.sum() == part.numel()


def test_boxes_that_touch_are_joined() -> None:
    experts = [((number, number + 1), half, (0, 4)) for number in range(3) for half in ((0, 2), (4, 6))]
    assert merged(experts) == (((0, 3), (0, 2), (0, 4)), ((0, 3), (4, 6), (0, 4)))
    assert merged([((0, 2), (0, 4)), ((2, 8), (0, 4))]) == (((0, 8), (0, 4)),)
    assert merged([]) == ()
    assert merged([()]) == ((),)


def test_boxes_that_overlap_are_refused() -> None:
    assert merged([((0, 3), (0, 4)), ((2, 8), (0, 4))]) is None


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("piece", [2**24, 20, 7, 1])
@pytest.mark.parametrize(
    ("shape", "box", "other"),
    [
        ((8, 6), ((2, 4), (0, 6)), ((4, 6), (0, 6))),
        ((8, 6), ((0, 8), (0, 3)), ((0, 8), (3, 6))),
        ((5, 4, 6), ((0, 5), (0, 2), (0, 6)), ((0, 5), (2, 4), (0, 6))),
        ((5, 4, 6), ((1, 3), (0, 4), (2, 4)), ((1, 3), (0, 4), (4, 6))),
        ((9,), ((1, 4),), ((4, 7),)),
    ],
)
def test_a_box_agrees_with_the_sums_of_the_whole_tensor_and_another_one_does_not(
    monkeypatch: pytest.MonkeyPatch, piece: int, shape: tuple[int, ...], box: Box, other: Box
) -> None:
    monkeypatch.setattr(sums, "PIECE", piece)
    whole = numbers(*shape)
    of_whole = sums_of(whole)
    assert of_whole.shape == (num_sums(shape),)
    assert agree(inside(whole, box), box, shape, of_whole)
    assert not agree(inside(whole, other), box, shape, of_whole)
    changed = inside(whole, box).clone()
    changed.view(torch.int16).view(-1)[-1] ^= 1
    assert not agree(changed, box, shape, of_whole)


def test_of_a_box_without_whole_rows_or_columns_nothing_is_known() -> None:
    whole, box = numbers(8, 6), ((2, 4), (1, 3))
    assert agree(inside(whole, box), box, (8, 6), sums_of(whole)) is None
    assert agree(whole[:0], ((0, 0), (0, 6)), (8, 6), sums_of(whole))
    assert whole_box((8, 6)) == ((0, 8), (0, 6))
