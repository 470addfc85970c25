"""Python code that a PPOJob names: an installed module, or a file; each mistake has its sentence.

Called for reward functions, estimators, policy losses, training engines and users' own worker groups. It knows nothing
of what the code is for, and calls none of it beyond the import.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

__all__ = ["UserCodeError", "check_call", "find_class", "find_function", "import_user_code"]


class UserCodeError(RuntimeError):
    """The code cannot be had; the message begins with the field of the PPOJob that names it."""


def import_user_code(field: str, module: str | None, path: str | Path | None) -> ModuleType:
    """Import the module of that dotted name, or the Python file; one of the two is given.

    A file becomes a module whose name depends on its path alone, so that all processes that import it mean the same,
    and is executed once in each.

    Args:
        field: of the PPOJob, which holds `module` and `path`; for messages.

    Raises:
        UserCodeError: says what could not be imported, why, and what to do.
    """
    if (module is None) == (path is None):
        raise UserCodeError(f"{field}: set exactly one of module and path")
    if module is not None:
        return _import_module(field, module)
    return _import_file(field, Path(str(path)))


def find_function(loaded: ModuleType, name: str, name_field: str, where: str) -> Callable[..., Any]:
    """Return the function of that name.

    Args:
        name_field: the field of the PPOJob that holds the name; where: the module or the file; for messages.

    Raises:
        UserCodeError: there is none; says which there are.
    """
    function = getattr(loaded, name, None)
    if function is None:
        own = [
            key
            for key, value in vars(loaded).items()
            if inspect.isfunction(value) and value.__module__ == loaded.__name__ and not key.startswith("_")
        ]
        choice = f"set {name_field} to one of {', '.join(own)}" if own else "it defines no function at all"
        raise UserCodeError(f"{where} has no function {name!r}: {choice}")
    if not callable(function):
        raise UserCodeError(f"{name!r} in {where} is a {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)


def find_class(loaded: ModuleType, name: str, name_field: str, where: str) -> type[Any]:
    """Return the class of that name.

    Args:
        name_field: the field of the PPOJob that holds the name; where: the module or the file; for messages.

    Raises:
        UserCodeError: there is none; says which there are.
    """
    found = getattr(loaded, name, None)
    if not isinstance(found, type):
        own = [
            key
            for key, value in vars(loaded).items()
            if isinstance(value, type) and value.__module__ == loaded.__name__ and not key.startswith("_")
        ]
        choice = f"set {name_field} to one of {', '.join(own)}" if own else "it defines no class at all"
        raise UserCodeError(f"{where} has no class {name!r}: {choice}")
    return cast("type[Any]", found)


def check_call(found: type[Any], kwargs: Mapping[str, Any], where: str, given: str) -> None:
    """Refuse a class that cannot be called with one positional argument and the kwargs of the PPOJob.

    Args:
        where: the field of the PPOJob; given: the positional argument, with its article; for messages.

    Raises:
        UserCodeError: says what its signature is, and why it does not fit.
    """
    signature = inspect.signature(found)
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        raise UserCodeError(
            f"{where}: {found.__name__}{signature} cannot be called with {given} and the kwargs "
            f"{', '.join(kwargs) or '(none)'}: {error}"
        ) from error


def _import_module(field: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # the user's module may raise anything; it becomes a named error
        raise UserCodeError(f"{field}.module {module!r}: {_reason(field, error)}") from error


def _import_file(field: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UserCodeError(
            f"{field}.path {str(path)!r}: there is no such file where the trainer runs. Give the path as the "
            "container sees it (below storage.mountPath), or put the file into the image"
        )
    # Of the path as it is given: where a ConfigMap is mounted it is a link, which leads elsewhere in each pod.
    name = f"ppojob_user_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{field}.path {str(path)!r}: not a Python file (its name must end in .py)")
    loaded = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name.
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:  # the user's file may raise anything; it becomes a named error
        del sys.modules[name]
        raise UserCodeError(f"{field}.path {str(path)!r}: {_reason(field, error)}") from error
    return loaded


def _reason(field: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f"No module named {error.name!r}. Install the package that has it in the trainer's image, or correct the "
            f"name; for a file of your own, set {field}.path"
        )
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno}). Correct the file"
    said = f"its import failed with {type(error).__name__}: {error}"
    return f"{said}. Import it in the trainer's image to see the whole error"
