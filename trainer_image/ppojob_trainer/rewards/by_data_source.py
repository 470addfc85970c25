"""A function for each data set, by verl's names: `reward.function.module: ppojob_trainer.rewards.by_data_source`.

It takes the place of verl's `default_compute_score`. Data sets whose functions there run code in a sandbox, search, or
read pictures have no counterpart here; they are refused before the first step. A row of data names its data set in the
column `data_source`, or `dataSource` of `data.train` does for all rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_PACKAGE = "ppojob_trainer.rewards"


@dataclass(frozen=True)
class Counterpart:
    """The function for a data set: a module of this package, and its keyword arguments."""

    module: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


_GSM8K: Final = Counterpart("gsm8k")
_MATH: Final = Counterpart("math")
# verl's scores for these are 1 and -1.
_CONTEST: Final = Counterpart("math", {"wrong_score": -1.0})

COUNTERPARTS: Final[Mapping[str, Counterpart]] = {
    "openai/gsm8k": _GSM8K,
    "lighteval/MATH": _MATH,
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "math_dapo": _CONTEST,
    "math": _CONTEST,
    "math_dapo_reasoning": _CONTEST,
    "numina_aops_forum": _MATH,
    "numina_synthetic_math": _MATH,
    "numina_amc_aime": _MATH,
    "numina_synthetic_amc": _MATH,
    "numina_cn_k12": _MATH,
    "numina_olympiads": _MATH,
}
"""By the whole name."""
PREFIXES: Final[Mapping[str, Counterpart]] = {
    "aime": _CONTEST,
    "reasoning_gym/": Counterpart("reasoning_gym", {"extract": "last_number"}),
}
"""By the first letters of the name."""


def compute_score(*, data_source: str, **arguments: Any) -> Any:
    """Score one response by its data set's function; returns what that returns.

    Raises:
        ValueError: there is none for this data set; says which there are.
    """
    found = counterpart(data_source)
    function = importlib.import_module(f"{_PACKAGE}.{found.module}").compute_score
    return function(data_source=data_source, **{**found.kwargs, **arguments})


def check(data_sources: Sequence[str], **kwargs: Any) -> None:
    """Refuse data sets that have no function here before the first step.

    Raises:
        ValueError: names all of them, and says which there are.
    """
    for data_source in data_sources:
        counterpart(data_source)
    if kwargs:
        raise ValueError(f"it takes no kwargs, got {', '.join(sorted(kwargs))}: name the function itself as module")


def counterpart(data_source: str) -> Counterpart:
    """Return the function for a data set.

    Raises:
        ValueError: there is none; says which there are.
    """
    if data_source in COUNTERPARTS:
        return COUNTERPARTS[data_source]
    for prefix, found in PREFIXES.items():
        if data_source.startswith(prefix):
            return found
    known = ", ".join([*COUNTERPARTS, *(f"{prefix}*" for prefix in PREFIXES)])
    raise ValueError(
        f"no reward function for the data source {data_source!r}; there are some for {known}. Set dataSource of "
        "the data to one of them, or use your own function"
    )
