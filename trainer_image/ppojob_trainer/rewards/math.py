r"""Mathematical answers, compared by the library math-verify: `reward.function.module: ppojob_trainer.rewards.math`.

It reads LaTeX (\boxed{...} before anything else) and plain expressions, and compares them as mathematics: 1/2, 0.5 and
\frac{1}{2} are equal. Its own limits end a comparison that takes longer than `limit_seconds`, which scores as wrong;
`reward.function.timeoutSeconds` ends what these limits cannot, such as powers of huge numbers.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig  # type: ignore[import-untyped]

# It logs every response that it cannot read, with a stack.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def compute_score(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    score: float = 1.0,
    wrong_score: float = 0.0,
    limit_seconds: int = 5,
) -> dict[str, Any]:
    r"""Score one response: `score` if its answer equals the ground truth, else `wrong_score`.

    Args:
        ground_truth: the answer in LaTeX without $, or a solution with the answer in \boxed.
        limit_seconds: longest time for reading, and for comparing.

    Returns:
        `score`; `answer`, the answer as it was read; `is_answered`, whether there was one.

    Raises:
        ValueError: the ground truth cannot be read.
    """
    _load_slow_parts()
    text = str(ground_truth) if r"\boxed" in str(ground_truth) else rf"\boxed{{{ground_truth}}}"
    truth = parse(text, [LatexExtractionConfig()], parsing_timeout=limit_seconds)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} is not LaTeX that math-verify reads")
    configs = [ExprExtractionConfig(), LatexExtractionConfig()]
    answer = parse(solution_str, configs, parsing_timeout=limit_seconds)
    is_right = bool(answer) and verify(truth, answer, timeout_seconds=limit_seconds)
    shown = str(answer[-1]) if answer else ""
    return {"score": score if is_right else wrong_score, "answer": shown, "is_answered": bool(answer)}


@functools.cache
def _load_slow_parts() -> None:
    """Compare once without a limit: the first comparison loads much of SymPy, which takes seconds on a busy machine.

    Within a limit, that could end the comparison of a right answer.
    """
    texts = (r"\boxed{(x+1)^2}", r"\boxed{x^2+2x+1}")
    one, other = (parse(text, [LatexExtractionConfig()], parsing_timeout=None) for text in texts)
    verify(one, other, timeout_seconds=None)
