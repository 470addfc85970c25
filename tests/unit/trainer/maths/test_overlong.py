"""The penalty of overlong responses, by hand."""

import pytest
import torch

from ppojob_trainer.maths.overlong import Overlong


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (1, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (10, 2.0)], ids=str)
def test_it_grows_over_the_buffer(length: int, expected: float) -> None:
    mask = (torch.arange(10) < length).long().unsqueeze(0)
    rewards = torch.arange(10.0).unsqueeze(0)

    penalized, penalty = Overlong(max_length=10, buffer=4, factor=2.0).penalized(rewards, mask)

    difference = rewards - penalized
    assert penalty.tolist() == [pytest.approx(expected)]
    assert difference.sum().item() == pytest.approx(expected)
    if expected:
        assert difference[0, length - 1].item() == pytest.approx(expected), "of the last token"


def test_gaps_do_not_count() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0]])

    penalized, penalty = Overlong(max_length=4, buffer=2).penalized(torch.zeros(1, 5), mask)

    assert penalty.tolist() == [0.5]
    assert penalized.tolist() == [[0.0, 0.0, 0.0, -0.5, 0.0]]
