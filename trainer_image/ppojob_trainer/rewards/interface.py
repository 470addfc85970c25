"""The types between a batch and a reward function."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Score = float | Mapping[str, Any]
"""What a reward function says of one response."""


class ComputeScore(Protocol):
    """A reward function as verl calls it: by these four keywords.

    data_source: name of the data set. solution_str: the response as text, special tokens left out. ground_truth: of
    the prompt. extra_info: the prompt's own dictionary. Returns the score, or a dict with `score` and any further
    entries, which are kept beside it; numbers among them become the metrics `reward/<key>/mean`. A coroutine function
    returns the same when it is awaited.
    """

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Score | Awaitable[Score]:
        """Return the score of one response."""
        ...


@dataclass(frozen=True)
class ScoreItem:
    """One response to be scored; `index` names its prompt in errors."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    index: int | str


@dataclass(frozen=True)
class ScoreResult:
    """A finite score, and what else the function returned. `error` is set where `onError: Score` stood in."""

    score: float
    extras: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
