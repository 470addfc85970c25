"""Scores a batch with a reward function, and applies `reward.function.onError` to responses that it does not score.

Called by the reward workers, each of which has its own Scorer. The processes and their limits are in `processes`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from ppojob_trainer.rewards.errors import RewardFunctionError, RewardTimeoutError
from ppojob_trainer.rewards.interface import ScoreItem, ScoreResult
from ppojob_trainer.rewards.loader import FunctionSource
from ppojob_trainer.rewards.scoring.messages import Answer
from ppojob_trainer.rewards.scoring.processes import Processes

__all__ = ["OnError", "Scorer"]

logger = logging.getLogger(__name__)

OnError = Literal["Fail", "Score", "Drop"]

_NUM_LOGGED = 8
_SHOWN = 200


class Scorer:
    """Scores batches with one reward function."""

    def __init__(
        self,
        source: FunctionSource,
        *,
        on_error: OnError = "Fail",
        error_score: float = 0.0,
        timeout_seconds: float = 60.0,
        concurrency: int | None = None,
    ) -> None:
        """
        Args:
            source: the function, plain or a coroutine function.
            on_error: for a response that the function does not score. Fail: raise. Score: `error_score`. Drop: a
                result with `is_dropped`.
            timeout_seconds: longest time for one response.
            concurrency: responses at the same time, see `Processes`.
        """
        if timeout_seconds <= 0 or (concurrency is not None and concurrency < 1):
            raise ValueError(
                f"timeout_seconds and concurrency must be above 0, got {timeout_seconds} and {concurrency}"
            )
        self._on_error = on_error
        self._error_score = error_score
        self._timeout_seconds = timeout_seconds
        self._processes = Processes(source, timeout_seconds=timeout_seconds, concurrency=concurrency)

    def start(self, data_sources: Sequence[str] | None = None) -> None:
        """Load the function and call its own check, see `Processes.start`."""
        self._processes.start(data_sources)

    def close(self) -> None:
        """End the processes of the function."""
        self._processes.close()

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """Score all items, after `start`; results in their order.

        Raises:
            RewardFunctionError: with on_error Fail, at the first response that is seen to fail. A RewardTimeoutError
                if it exceeded the time limit.
            RewardProcessError: a process of the function cannot be started again.
        """
        results: dict[int, ScoreResult] = {}
        answers = self._processes.score(items)
        try:
            for answer in answers:
                results[answer.number] = self._result(answer, items[answer.number])
        finally:
            answers.close()
        failed = [results[place].error for place in sorted(results) if results[place].error is not None]
        for error in failed[:_NUM_LOGGED]:
            logger.warning("%s", error)
        if failed:
            logger.warning("%d of %d responses were not scored (onError: %s)", len(failed), len(items), self._on_error)
        return [results[place] for place in range(len(items))]

    def _result(self, answer: Answer, item: ScoreItem) -> ScoreResult:
        if answer.error is None:
            return ScoreResult(answer.score, dict(answer.extras))
        reason = answer.error
        if answer.is_timeout:
            reason = f"the reward function exceeded timeoutSeconds ({self._timeout_seconds:g} s)"
        text = f"{reason} for prompt {item.index} of {item.data_source!r}, response {item.solution_str[:_SHOWN]!r}"
        if self._on_error == "Fail":
            remedy = "Correct the function, or set reward.function.onError to Score or Drop"
            kind = RewardTimeoutError if answer.is_timeout else RewardFunctionError
            raise kind(f"{text}. {remedy}", item.index)
        is_dropped = self._on_error == "Drop"
        score = 0.0 if is_dropped else self._error_score
        return ScoreResult(score, error=text, is_timeout=answer.is_timeout, is_dropped=is_dropped)
