"""A reward that random weights can earn: the share of a response's characters that are small letters."""

import time
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], seconds: float = 0.0
) -> float:
    time.sleep(seconds)
    return sum(character.islower() for character in solution_str) / max(1, len(solution_str))
