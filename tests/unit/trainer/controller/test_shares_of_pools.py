"""How the rows of a batch are shared among the engines of several pools."""

import pytest

from ppojob_trainer.controller.generation import divided


@pytest.mark.parametrize(
    ("num_rows", "engines", "ends"),
    [
        (8, [1], [8]),
        (256, [4, 4], [128, 256]),
        (256, [1, 2], [85, 256]),
        (3, [1, 1], [1, 3]),
        # Engines that get nothing would not sleep afterwards, and keep their memory while the pool trains.
        (4, [1, 8], [1, 4]),
        (4, [8, 1], [2, 4]),
        (5, [5, 1, 5], [1, 3, 5]),
        (1, [1, 1], [1, 1]),
    ],
)
def test_each_pool_gets_rows_by_its_engines_and_one_or_more(num_rows: int, engines: list[int], ends: list[int]) -> None:
    assert divided(num_rows, engines) == [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
