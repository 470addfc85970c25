"""Scores answers with reasoning-gym's own verifiers: `reward.function.module: ppojob_trainer.rewards.reasoning_gym`.

For prompts of the data source `ReasoningGym`, whose extra_info carries the task, its configuration and the entry.
"""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

from ppojob_trainer.rewards.extractors import extract_answer

with warnings.catch_warnings():
    # A dependency compares with `is "text"`; where warnings are errors, that would stop the import.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym  # type: ignore[import-untyped]


def compute_score(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    extract: str = "whole",
) -> dict[str, Any]:
    """Score one response, from 0 to 1, by the verifier of the prompt's task.

    Args:
        extra_info: `task` (name), `config` (of the task) and `entry` (question, answer, metadata).
        extract: which part of the response is the answer, see `extractors`.

    Returns:
        `score`, and `answer`, the part that was scored ("" if there was none).

    Raises:
        ValueError: the prompt is not of a reasoning-gym task, or `extract` is unknown.
    """
    if "task" not in extra_info or "entry" not in extra_info:
        raise ValueError(
            f"extra_info of a prompt from {data_source!r} has no task and entry: the data source must be ReasoningGym"
        )
    answer = extract_answer(solution_str, extract)
    task = _task(extra_info["task"], json.dumps(extra_info.get("config") or {}, sort_keys=True))
    score = task.score_answer(answer, extra_info["entry"])
    return {"score": float(score), "answer": answer or ""}


@functools.lru_cache(maxsize=64)
def _task(name: str, config: str) -> Any:
    # Verifiers may read the task's configuration, so it is built as it was for the prompts.
    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(config))
