"""A reward function that does not score every response: it raises for some, and never returns for others."""

import time
from typing import Any


def compute_score(*, solution_str: str, hangs: bool = False, **_: Any) -> float:
    if len(solution_str) % 3 == 0:
        if hangs:
            time.sleep(10**6)
        raise KeyError("every third length")
    return len(solution_str) / 100
