"""Equal numbers: `reward.function.module: ppojob_trainer.rewards.numeric_match`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ppojob_trainer.rewards.extractors import extract_answer


def compute_score(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    extract: str = "last_number",
    relative_tolerance: float = 1e-6,
    absolute_tolerance: float = 0.0,
    wrong_score: float = 0.0,
) -> dict[str, Any]:
    """Score one response: 1 if its number is near the ground truth, else `wrong_score`.

    Near: |answer - truth| <= max(relative_tolerance * max(|answer|, |truth|), absolute_tolerance).

    Args:
        ground_truth: a number, or a text that is one; commas between thousands, $ and % are ignored.
        extract: which part of the response is the answer, see `extractors`.

    Returns:
        `score`, and `answer`, what was compared ("" if it is not a number).

    Raises:
        ValueError: unknown `extract`, or the ground truth is not a number.
    """
    truth = _number(ground_truth)
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number: use exact_match or math")
    answer = _number(extract_answer(solution_str, extract))
    if answer is None:
        return {"score": wrong_score, "answer": ""}
    is_near = math.isclose(answer, truth, rel_tol=relative_tolerance, abs_tol=absolute_tolerance)
    return {"score": 1.0 if is_near else wrong_score, "answer": f"{answer:g}"}


def check(data_sources: Sequence[str], **kwargs: Any) -> None:
    """Refuse an unknown `extract` and negative tolerances before the first step.

    Raises:
        ValueError: says what is wrong.
    """
    extract_answer("", kwargs.get("extract", "last_number"))
    for name in ("relative_tolerance", "absolute_tolerance"):
        if kwargs.get(name, 0.0) < 0:
            raise ValueError(f"kwargs.{name} is {kwargs[name]}: it must be 0 or more")


def _number(value: Any) -> float | None:
    text = str(value).strip().replace(",", "").strip("$% ")
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
