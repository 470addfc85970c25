"""The punishment of overlong responses, by hand."""

import pytest
import torch

from ppojob_trainer.maths.overlong import Overlong


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (1, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (10, 2.0)], ids=str)
def test_it_grows_over_the_buffer(length: int, expected: float) -> None:
    mask = (torch.arange(10) < length).long().unsqueeze(0)
    rewards = torch.arange(10.0).unsqueeze(0)

    punished, punishment = Overlong(max_length=10, buffer=4, factor=2.0).punished(rewards, mask)

    difference = rewards - punished
    assert punishment.tolist() == [pytest.approx(expected)]
    assert difference.sum().item() == pytest.approx(expected)
    if expected:
        assert difference[0, length - 1].item() == pytest.approx(expected), "of the last token"


def test_gaps_do_not_count() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0]])

    punished, punishment = Overlong(max_length=4, buffer=2).punished(torch.zeros(1, 5), mask)

    assert punishment.tolist() == [0.5]
    assert punished.tolist() == [[0.0, 0.0, 0.0, -0.5, 0.0]]
