"""Equal texts: `reward.function.module: ppojob_trainer.rewards.exact_match`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppojob_trainer.rewards.extractors import extract_answer


def compute_score(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    extract: str = "whole",
    ignore_case: bool = False,
    score: float = 1.0,
    wrong_score: float = 0.0,
) -> dict[str, Any]:
    """Score one response: `score` if its answer is the ground truth, or one of a list of them, else `wrong_score`.

    White space at both ends does not count, nor does its amount between words.

    Args:
        extract: which part of the response is the answer, see `extractors`.

    Returns:
        `score`, and `answer`, what was compared ("" if there was none).

    Raises:
        ValueError: unknown `extract`, or there is no ground truth.
    """
    answer = _normal(extract_answer(solution_str, extract) or "", ignore_case)
    if isinstance(ground_truth, str) or not isinstance(ground_truth, Sequence):
        ground_truth = [ground_truth]
    truths = {_normal(str(truth), ignore_case) for truth in ground_truth if truth is not None} - {""}
    if not truths:
        raise ValueError("the prompt has no ground truth: set groundTruthColumn of the data, or use another function")
    return {"score": score if answer in truths else wrong_score, "answer": answer}


def check(data_sources: Sequence[str], **kwargs: Any) -> None:
    """Refuse an unknown `extract` before the first step.

    Raises:
        ValueError: says which there are.
    """
    extract_answer("", kwargs.get("extract", "whole"))


def _normal(text: str, ignore_case: bool) -> str:
    joined = " ".join(text.split())
    return joined.casefold() if ignore_case else joined
