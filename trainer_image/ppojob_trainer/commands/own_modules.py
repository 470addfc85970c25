"""Modules of this package that a PPOJob names, such as the reward functions: they must exist in this version.

Other modules are installed in the job's image alone, so nothing is known of them here. `manifest` calls it.
"""

import difflib
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import FieldError

_PACKAGE = "ppojob_trainer"


def module_errors(spec: PPOJobSpec) -> list[FieldError]:
    """Return an error for each field `module` that names a module of this package which does not exist."""
    return [
        FieldError(path, name, f"this version of {_PACKAGE} has no such module{_hint(name)}")
        for path, name in _modules("spec", spec.to_wire())
        if name.partition(".")[0] == _PACKAGE and not _exists(name)
    ]


def _modules(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "module" and isinstance(item, str):
                yield f"{path}.{key}", item
            yield from _modules(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _modules(f"{path}[{index}]", item)


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # A package above it does not exist.
        return False


def _hint(name: str) -> str:
    parent, _, last = name.rpartition(".")
    if not parent or not _exists(parent):
        return ""
    siblings = [module.name for module in pkgutil.iter_modules(getattr(import_module(parent), "__path__", ()))]
    near = difflib.get_close_matches(last, siblings, n=1)
    return f": did you mean {parent}.{near[0]}?" if near else ""
