"""What `processes` and `child` send each other. Only plain values: the parent loads no class of the user's code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ppojob_trainer.rewards.interface import Extra
from ppojob_trainer.rewards.loader import FunctionSource


@dataclass(frozen=True)
class Setup:
    """The first message to a child.

    data_sources: names for the function's own check; None: no check. search_path: `sys.path` of the parent.
    """

    source: FunctionSource
    timeout_seconds: float
    data_sources: tuple[str, ...] | None
    search_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))


@dataclass(frozen=True)
class Ready:
    """The child has loaded the function and can score."""

    is_async: bool


@dataclass(frozen=True)
class Refused:
    """The child cannot score. is_import: the function cannot be imported; else its own check refuses its arguments."""

    message: str
    is_import: bool


@dataclass(frozen=True)
class Work:
    """One response; `item` is a pickled ScoreItem."""

    number: int
    item: bytes


@dataclass(frozen=True)
class Answer:
    """What became of one response: a score and its extras, or the reason why there is none."""

    number: int
    score: float = 0.0
    extras: Mapping[str, Extra] = field(default_factory=dict)
    error: str | None = None
    is_timeout: bool = False
