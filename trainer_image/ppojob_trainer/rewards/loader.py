"""From `reward.function` of the PPOJob to a function that can be called.

Called in the processes that score, and by functions that call other ones (`weighted`). It checks everything that can be
checked without a response, so that a job fails in its first minute and not after the first rollout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ppojob_trainer.rewards.errors import RewardError, RewardImportError, RewardRefusedError
from ppojob_trainer.rewards.interface import ComputeScore
from ppojob_trainer.user_code import UserCodeError, find_function, import_user_code

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
CHECK = "check"
"""Name of a module's own check: `check(data_sources, **kwargs)` raises ValueError to refuse them."""


@dataclass(frozen=True)
class FunctionSource:
    """Where a function comes from: the fields of `reward.function` that say so. It can be sent to another process.

    module: dotted name of an installed module; path: a Python file; exactly one of them is set. name: of the function.
    extract: passed to the function as `extract=` if not empty. kwargs: its further keyword arguments.
    """

    module: str | None = None
    path: str | None = None
    name: str = "compute_score"
    extract: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The module or the file."""
        return str(self.module if self.module is not None else self.path)

    @property
    def bound(self) -> dict[str, Any]:
        """All keyword arguments beyond those of every call."""
        return {**self.kwargs, **({"extract": self.extract} if self.extract else {})}


def load_reward_function(source: FunctionSource, field_name: str = "reward.function") -> ComputeScore:
    """Return the function, with its further arguments bound.

    Args:
        field_name: path of the field that holds `source`, for messages.

    Raises:
        RewardImportError: says what could not be imported, why, and what to do.
    """
    function = _function(_module(source, field_name), source)
    _check_call(function, source, field_name)
    return cast(ComputeScore, functools.partial(function, **source.bound) if source.bound else function)


def check_reward_function(
    source: FunctionSource, data_sources: Sequence[str], field_name: str = "reward.function"
) -> None:
    """Call the module's own `check`, if it has one, with the names of the data sets and the function's arguments.

    Raises:
        RewardImportError: see `load_reward_function`.
        RewardRefusedError: it refuses them; the message is its own.
    """
    check = getattr(_module(source, field_name), CHECK, None)
    if not callable(check):
        return
    try:
        check(list(data_sources), **source.bound)
    except RewardError:
        raise
    except ValueError as error:
        raise RewardRefusedError(f"{field_name} ({source.where}): {error}") from error
    except Exception as error:  # the user's check may raise anything; it becomes a named error
        reason = f"its check failed with {type(error).__name__}: {error}"
        raise RewardRefusedError(f"{field_name} ({source.where}): {reason}") from error


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a call must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _module(source: FunctionSource, field_name: str) -> ModuleType:
    path = None if source.path is None else Path(source.path)
    try:
        return import_user_code(field_name, source.module, path)
    except UserCodeError as error:
        raise RewardImportError(str(error)) from error.__cause__


def _function(loaded: ModuleType, source: FunctionSource) -> Callable[..., Any]:
    try:
        return find_function(loaded, source.name, "reward.function.name", source.where)
    except UserCodeError as error:
        raise RewardImportError(str(error)) from error


def _check_call(function: Callable[..., Any], source: FunctionSource, field_name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some built-in callables have no signature; the first call will show it.
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **source.bound)
    except TypeError as error:
        names = [*ARGUMENTS, *source.bound]
        raise RewardImportError(
            f"{field_name}: {source.name} of {source.where} has the signature {signature} and cannot be called with "
            f"{', '.join(f'{name}=' for name in names)}: {error}. Define {source.name}({', '.join(names)}), or correct "
            f"{field_name}.kwargs and extract"
        ) from error
