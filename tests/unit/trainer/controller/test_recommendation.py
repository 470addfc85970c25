"""What the busy fractions say about the layout."""

import pytest

from ppojob_trainer.controller.recommendation import recommend

OVER = "busy over the last"


@pytest.mark.parametrize(
    ("busy", "gpus", "sentence"),
    [
        ([], {"critic": 2}, ""),
        (
            [{"actor": 0.9, "critic": 0.38}],
            {"actor": 2, "critic": 2},
            f"pool critic was 38% {OVER} 1 steps: 1 GPU would do",
        ),
        ([{"critic": 0.2}, {"critic": 0.6}], {"critic": 8}, f"pool critic was 40% {OVER} 2 steps: 4 GPUs would do"),
        ([{"critic": 0.1}], {"critic": 1}, ""),
        ([{"critic": 0.55}], {"critic": 8}, ""),
        ([{"critic": 0.0}] * 5 + [{"critic": 0.9}] * 10, {"critic": 8}, ""),
    ],
)
def test_a_quiet_pool_could_do_with_fewer_gpus(
    busy: list[dict[str, float]], gpus: dict[str, int], sentence: str
) -> None:
    assert recommend(busy, gpus) == sentence
