"""The weighted sum of several reward functions: `reward.function.module: ppojob_trainer.rewards.weighted`.

    kwargs:
      functions:
        - {name: correct, weight: 1.0, module: ppojob_trainer.rewards.gsm8k}
        - {name: style, weight: 0.2, path: /data/style.py, function: compute_style, kwargs: {words: 40}}

Each function's own score is kept beside the sum, so it is the metric `reward/<name>/mean`; what a function returns
beside its score is kept as `<name>/<key>`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ppojob_trainer.rewards.interface import ComputeScore
from ppojob_trainer.rewards.loader import FunctionSource, check_reward_function, load_reward_function

_KEYS: Final = ("name", "weight", "module", "path", "function", "extract", "kwargs")
_RESERVED: Final = ("score", "error", "errors", "timeouts", "dropped", "function", "model")


@dataclass(frozen=True)
class Part:
    """One function of the sum."""

    name: str
    weight: float
    source: FunctionSource

    @property
    def field(self) -> str:
        """How messages name it."""
        return f"reward.function.kwargs.functions ({self.name})"


def compute_score(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    functions: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Score one response by the sum of weight x score over `functions`.

    The functions are called one after the other; coroutine functions, too.

    Returns:
        `score`, each function's score under its name, and its further entries under `<name>/<key>`.

    Raises:
        ValueError: see `parts_of`; or a function returned a dict without score.
    """
    total = 0.0
    beside: dict[str, Any] = {}
    for part, function in _loaded(json.dumps(list(functions), sort_keys=True)):
        value: Any = function(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if isinstance(value, Mapping):
            if "score" not in value:
                raise ValueError(f"{part.name} returned a dict without 'score': it has {sorted(map(str, value))}")
            beside |= {f"{part.name}/{key}": entry for key, entry in value.items() if key != "score"}
            value = value["score"]
        beside[part.name] = float(value)
        total += part.weight * float(value)
    return {"score": total, **beside}


def check(data_sources: Sequence[str], *, functions: Sequence[Mapping[str, Any]]) -> None:
    """Load all functions, and call their own checks, before the first step.

    Raises:
        ValueError: see `parts_of`.
        RewardImportError, RewardRefusedError: of one of the functions.
    """
    for part in parts_of(functions):
        load_reward_function(part.source, part.field)
        check_reward_function(part.source, data_sources, part.field)


def parts_of(functions: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return the functions of the sum.

    Raises:
        ValueError: there is none, a key is unknown, or a name is missing, reserved or used twice.
    """
    if not isinstance(functions, Sequence) or isinstance(functions, str) or not functions:
        raise ValueError("kwargs.functions is empty: list each function with name, weight, and module or path")
    parts: list[Part] = []
    for place, given in enumerate(functions):
        where = f"kwargs.functions[{place}]"
        unknown = sorted(given.keys() - set(_KEYS)) if isinstance(given, Mapping) else [str(given)]
        if unknown:
            raise ValueError(f"{where}: unknown {', '.join(unknown)}; the keys are {', '.join(_KEYS)}")
        name, weight = given.get("name"), given.get("weight", 1.0)
        if not isinstance(name, str) or not name or name in _RESERVED or name in {part.name for part in parts}:
            raise ValueError(f"{where}.name is {name!r}: give each function another name, none of {_RESERVED}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"{where}.weight is {weight!r}: it must be a number")
        source = FunctionSource(
            given.get("module"),
            given.get("path"),
            given.get("function", "compute_score"),
            given.get("extract", ""),
            given.get("kwargs") or {},
        )
        parts.append(Part(name, float(weight), source))
    return parts


@functools.lru_cache(maxsize=8)
def _loaded(functions: str) -> list[tuple[Part, ComputeScore]]:
    return [(part, load_reward_function(part.source, part.field)) for part in parts_of(json.loads(functions))]
