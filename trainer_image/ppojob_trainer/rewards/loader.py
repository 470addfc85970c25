"""From what the PPOJob says (`reward.function`) to a function that can be called.

Called by the reward workers at start, and by `ppojob validate`. It checks all that can be known without calling the
function, so that a job fails in its first minute and not after the first rollout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ppojob_trainer.rewards.errors import RewardImportError
from ppojob_trainer.rewards.interface import ComputeScore
from ppojob_trainer.user_code import UserCodeError, import_user_code

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(
    module: str | None = None,
    path: str | Path | None = None,
    name: str = "compute_score",
    extract: str = "",
    kwargs: Mapping[str, Any] | None = None,
) -> ComputeScore:
    """Return the function `name` of an installed module (dotted name) or of a Python file; give one of the two.

    Args:
        extract: passed to the function as `extract=` if not empty.
        kwargs: further keyword arguments of the function.

    Raises:
        RewardImportError: says what could not be imported, why, and what to do.
    """
    try:
        loaded = import_user_code("reward.function", module, path)
    except UserCodeError as error:
        raise RewardImportError(str(error)) from error.__cause__
    where = module if module is not None else str(path)
    function = _function(loaded, name, where)
    bound = {**(kwargs or {}), **({"extract": extract} if extract else {})}
    _check_call(function, bound, f"{name} of {where}")
    return cast(ComputeScore, functools.partial(function, **bound) if bound else function)


def _function(loaded: ModuleType, name: str, where: str) -> Callable[..., Any]:
    function = getattr(loaded, name, None)
    if function is None:
        own = [
            key
            for key, value in vars(loaded).items()
            if inspect.isfunction(value) and value.__module__ == loaded.__name__ and not key.startswith("_")
        ]
        choice = f"set reward.function.name to one of {', '.join(own)}" if own else "it defines no function at all"
        raise RewardImportError(f"{where} has no function {name!r}: {choice}")
    if not callable(function):
        raise RewardImportError(f"{name!r} in {where} is a {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)


def _check_call(function: Callable[..., Any], bound: Mapping[str, Any], what: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some built-in callables have no signature; the first call will tell.
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **bound)
    except TypeError as error:
        wanted = ", ".join(f"{key}=" for key in [*ARGUMENTS, *bound])
        raise RewardImportError(
            f"{what} has the signature {signature} and cannot be called with {wanted}: {error}"
        ) from error
