"""The types between a batch and a reward function."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Score = float | Mapping[str, Any]
"""What a reward function returns for one response."""

Extra = float | str | None
"""An entry beside the score: numbers become metrics, all else is text."""


class ComputeScore(Protocol):
    """A reward function, called with these four keywords as in verl.

    data_source: name of the data set. solution_str: the response as text, without special tokens. ground_truth: of
    the prompt. extra_info: the prompt's own dictionary. Returns the score, or a dict with `score` and further entries,
    which are kept beside it; numbers among them become the metrics `reward/<key>/mean`. A coroutine function returns
    the same when it is awaited.
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
    """A finite score, and what else the function returned.

    error: why the function gave no score; `score` is then `errorScore`, or 0 with `is_dropped`. is_timeout: the reason
    is the time limit. is_dropped: the response is left out of advantages, losses and means.
    """

    score: float
    extras: dict[str, Extra] = field(default_factory=dict)
    error: str | None = None
    is_timeout: bool = False
    is_dropped: bool = False
