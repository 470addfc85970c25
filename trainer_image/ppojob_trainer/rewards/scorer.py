"""Runs a reward function over a batch, several responses at a time, with a time limit.

Threads: functions that wait (a judge behind HTTP, a sandbox) overlap. Coroutine functions overlap in one event loop.
Functions that compute get their parallelism from the reward group, which runs one of these in each of its processes.
Called by the reward workers.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ppojob_trainer.rewards.errors import RewardFunctionError, RewardTimeoutError
from ppojob_trainer.rewards.interface import ComputeScore, ScoreItem, ScoreResult

OnError = Literal["Fail", "Score"]
# How many prompts an error names.
_NAMED = 8

MAX_CONCURRENT = 64
"""Calls of a coroutine function that wait at the same time in one process."""


class Scorer:
    """Scores batches with one reward function."""

    def __init__(
        self,
        function: ComputeScore,
        *,
        num_threads: int = 1,
        on_error: OnError = "Fail",
        error_score: float = 0.0,
        timeout_seconds: float = 60.0,
    ) -> None:
        """
        Args:
            function: plain or a coroutine function, of whose calls `MAX_CONCURRENT` run at the same time.
            num_threads: responses scored at the same time; above 1 the function must be thread-safe. One thread runs
                the event loop of a coroutine function.
            on_error: Fail raises at the first response whose function raised; Score gives it `error_score`.
            timeout_seconds: longest time for one batch.
        """
        if num_threads < 1 or timeout_seconds <= 0:
            raise ValueError(f"num_threads and timeout_seconds must be above 0, got {num_threads}, {timeout_seconds}")
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._num_threads = 1 if self._is_async else num_threads
        self._on_error = on_error
        self._error_score = error_score
        self._timeout_seconds = timeout_seconds

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """Score all items; results in their order.

        Raises:
            RewardFunctionError: with on_error Fail, the failure of the first item in the batch that was seen to fail.
            RewardTimeoutError: the batch took longer than the limit; with either on_error, as its threads hang on.
        """
        batch = _Batch(items)
        work: Callable[[_Batch], None] = self._work_in_loop if self._is_async else self._work
        threads = [
            # Daemons: a function that never returns must not keep the process from ending.
            threading.Thread(target=work, args=(batch,), name=f"reward-{number}", daemon=True)
            for number in range(min(self._num_threads, len(items)))
        ]
        deadline = time.monotonic() + self._timeout_seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            batch.stop()
            raise RewardTimeoutError(self._timeout_message(batch))
        failure = batch.first_failure()
        if failure is not None:
            raise failure
        return batch.finished()

    def _work(self, batch: _Batch) -> None:
        while (place := batch.take()) is not None:
            item = batch.items[place]
            try:
                value = self._function(**_arguments(item))
            except BaseException as error:  # noqa: BLE001 - user code; even a SystemExit would end the thread without a word
                self._settle(batch, place, error)
            else:
                self._settle(batch, place, value)

    def _work_in_loop(self, batch: _Batch) -> None:
        async def work() -> None:
            while (place := batch.take()) is not None:
                item = batch.items[place]
                try:
                    value = await self._function(**_arguments(item))  # type: ignore[misc]
                except BaseException as error:  # noqa: BLE001 - user code, as above
                    self._settle(batch, place, error)
                else:
                    self._settle(batch, place, value)

        async def together() -> None:
            await asyncio.gather(*(work() for _ in range(min(MAX_CONCURRENT, len(batch.items)))))

        asyncio.run(together())

    def _settle(self, batch: _Batch, place: int, outcome: Any) -> None:
        """Note what the function returned for an item, or the exception that it raised."""
        item = batch.items[place]
        try:
            if isinstance(outcome, BaseException):
                raise _failure(outcome, item) from outcome
            batch.put(place, _result(outcome, item))
        except RewardFunctionError as error:
            if self._on_error == "Fail":
                batch.fail(place, error)
            else:
                batch.put(place, ScoreResult(self._error_score, error=str(error)))

    def _timeout_message(self, batch: _Batch) -> str:
        busy = [str(batch.items[place].index) for place in batch.busy()]
        shown = ", ".join(busy[:_NAMED]) + (", ..." if len(busy) > _NAMED else "")
        return (
            f"the reward function did not score {len(batch.items)} responses within {self._timeout_seconds:g} s; "
            f"{batch.num_done()} were done, and it was busy with prompt {shown}. Make it faster, give it a limit of "
            "its own, or raise reward.function.timeoutSeconds or numWorkers"
        )


class _Batch:
    """What the threads share; every access holds the lock."""

    def __init__(self, items: Sequence[ScoreItem]) -> None:
        self.items = items
        self._lock = threading.Lock()
        self._next = 0
        self._results: dict[int, ScoreResult] = {}
        self._failures: dict[int, RewardFunctionError] = {}
        self._stopped = False

    def take(self) -> int | None:
        with self._lock:
            if self._stopped or self._next == len(self.items):
                return None
            self._next += 1
            return self._next - 1

    def put(self, place: int, result: ScoreResult) -> None:
        with self._lock:
            self._results[place] = result

    def fail(self, place: int, error: RewardFunctionError) -> None:
        with self._lock:
            self._failures[place] = error
            self._stopped = True

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def busy(self) -> list[int]:
        with self._lock:
            return [place for place in range(self._next) if place not in self._results | self._failures]

    def num_done(self) -> int:
        with self._lock:
            return len(self._results)

    def first_failure(self) -> RewardFunctionError | None:
        with self._lock:
            return self._failures[min(self._failures)] if self._failures else None

    def finished(self) -> list[ScoreResult]:
        with self._lock:
            return [self._results[place] for place in range(len(self.items))]


def _arguments(item: ScoreItem) -> dict[str, Any]:
    return {
        "data_source": item.data_source,
        "solution_str": item.solution_str,
        "ground_truth": item.ground_truth,
        "extra_info": item.extra_info,
    }


def _failure(error: BaseException, item: ScoreItem) -> RewardFunctionError:
    return RewardFunctionError(
        f"the reward function raised {type(error).__name__}: {error} for prompt {item.index} of "
        f"{item.data_source!r}, response {item.solution_str[:200]!r}. Correct the function, or set "
        "reward.function.onError: Score",
        item.index,
    )


def _result(value: Any, item: ScoreItem) -> ScoreResult:
    extras: dict[str, Any] = {}
    score = value
    if isinstance(value, Mapping):
        if "score" not in value:
            raise RewardFunctionError(
                f"the reward function returned a dict without 'score' for prompt {item.index}: it has "
                f"{sorted(map(str, value))}",
                item.index,
            )
        score = value["score"]
        extras = {key: entry for key, entry in value.items() if key != "score"}
    try:
        number = math.nan if isinstance(score, str) else float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardFunctionError(
            f"the reward function returned {score!r} for prompt {item.index}: a score is a finite number", item.index
        )
    return ScoreResult(number, extras)
