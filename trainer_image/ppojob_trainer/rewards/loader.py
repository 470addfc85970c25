"""From what the PPOJob says (`reward.function`) to a function that can be called.

Called by the reward workers at start, and by `ppojob validate`. It checks all that can be known without calling the
function, so that a job fails in its first minute and not after the first rollout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ppojob_trainer.rewards.errors import RewardImportError
from ppojob_trainer.rewards.interface import ComputeScore

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
    if (module is None) == (path is None):
        raise RewardImportError("reward.function needs either module or path, not both and not neither")
    loaded = _import_module(module) if module is not None else _import_file(Path(cast("str | Path", path)))
    where = module if module is not None else str(path)
    function = _function(loaded, name, where)
    bound = {**(kwargs or {}), **({"extract": extract} if extract else {})}
    _check_call(function, bound, f"{name} of {where}")
    return cast(ComputeScore, functools.partial(function, **bound) if bound else function)


def _import_module(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # the user's module may raise anything; it becomes a named error
        raise RewardImportError(f"reward.function.module {module!r}: {_reason(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardImportError(
            f"reward.function.path {str(path)!r}: there is no such file where the trainer runs. Give the path as the "
            "container sees it (below storage.mountPath), or put the file into the image"
        )
    name = f"ppojob_reward_{abs(hash(str(path.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardImportError(f"reward.function.path {str(path)!r}: not a Python file (its name must end in .py)")
    loaded = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name.
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:  # the user's file may raise anything; it becomes a named error
        del sys.modules[name]
        raise RewardImportError(f"reward.function.path {str(path)!r}: {_reason(error)}") from error
    return loaded


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f"No module named {error.name!r}. Install the package that has it in the trainer's image, or correct the "
            "name; a file of yours is named with reward.function.path"
        )
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno}). Correct the file"
    return f"its import failed with {type(error).__name__}: {error}. Import it in the trainer's image to see all of it"


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
    if inspect.iscoroutinefunction(function):
        raise RewardImportError(f"{name!r} in {where} is a coroutine function: write it as a plain function")
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
