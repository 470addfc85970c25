"""GSM8K's rule, with verl's scores: `reward.function.module: ppojob_trainer.rewards.gsm8k`.

Strict wants the answer after `####`, as the data set writes it; Flexible takes the last number. Both read the last 300
characters, and give what verl's `gsm8k.compute_score` gives; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

READ_CHARACTERS: Final = 300
METHODS: Final = ("strict", "flexible")
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"(-?[0-9.,]+)")


def compute_score(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    method: str = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score one response: `score` for the right answer, `format_score` for another one, 0 for none.

    Args:
        ground_truth: the number, or a solution of the data set, whose number is after `####`.
        method: strict or flexible.

    Returns:
        `score`, and `answer`, what was compared with the ground truth ("" if there was none).

    Raises:
        ValueError: unknown method.
    """
    answer = extract(solution_str, method)
    if answer is None:
        return {"score": 0.0, "answer": ""}
    return {"score": score if answer == _truth(ground_truth) else format_score, "answer": answer}


def check(data_sources: Sequence[str], **kwargs: Any) -> None:
    """Refuse an unknown method before the first step.

    Raises:
        ValueError: says which there are.
    """
    extract("", kwargs.get("method", METHODS[0]))


def extract(response: str, method: str) -> str | None:
    """Return the answer of a response; None if it has none.

    Raises:
        ValueError: unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    end = response[-READ_CHARACTERS:]
    if method == "strict":
        marked = _MARKED.findall(end)
        return marked[-1].replace(",", "") if marked else None
    numbers = _NUMBER.findall(end)
    # Where none is a number, verl compares the first one.
    return next((number for number in reversed(numbers) if number != "."), numbers[0]) if numbers else None


def _truth(ground_truth: Any) -> str:
    text = str(ground_truth)
    marked = _MARKED.findall(text)
    return marked[-1].replace(",", "") if marked else text
