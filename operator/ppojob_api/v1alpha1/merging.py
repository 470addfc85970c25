"""Merges objects of Kubernetes' APIs, lists by the keys that `kubectl apply` uses.

The operator merges users' pod templates into its own with it, and `templates.py` a PPOJob into its template. It knows
names of fields only, no schema.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
"""Lists that are merged by a key (core/v1 patchMergeKey)."""

INTEGER_KEYS = {"containerPort"}
"""The keys that are integers; the others are strings."""

_APPENDED = {
    "tolerations",
    "envFrom",
    "add",
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
}
"""Lists to which items are appended: `add` are a container's capabilities, the long ones affinity terms, which `spread`
may set too. Other lists are replaced."""

_WHOLE = {"env", "resourceClaims", "topology"}
"""Objects of which exactly one of several fields is set, such as `value` and `valueFrom`: they are replaced."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` merged into it; where both have a value, that of `over` wins.

    A list in `MERGE_KEYS` with items that lack a valid key is replaced: its validation says what is wrong with it.
    """
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and name not in _WHOLE:
            result[name] = merged(old, value)
        elif isinstance(old, list) and isinstance(value, list) and _have_keys(name, [*old, *value]):
            result[name] = _merged_lists(name, old, value)
        elif isinstance(old, list) and isinstance(value, list) and name in _APPENDED:
            result[name] = old + value
        else:
            result[name] = value
    return result


def is_merge_key(key: str, value: Any) -> bool:
    """Return whether a value has the type of a merge key. Free-form fields may have any value there, even a list."""
    if key in INTEGER_KEYS:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)


def identity(key: str, value: Any) -> Any:
    """Return what two items have in common if they are the same item: the value of the key, or the folder of a path."""
    return folder(value) if key == "mountPath" and isinstance(value, str) else value


def folder(path: str) -> str:
    """Return a path in a container in its shortest form: `//data/./` is /data, and so is `data` to the kubelet."""
    # Two leading slashes mean the same as one to Linux, not to normpath.
    return posixpath.normpath("/" + path.lstrip("/"))


def _have_keys(name: str, items: list[Any]) -> bool:
    key = MERGE_KEYS.get(name)
    return key is not None and all(isinstance(item, Mapping) and is_merge_key(key, item.get(key)) for item in items)


def _merged_lists(name: str, base: list[dict[str, Any]], over: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge items with the same key in place; append the others."""
    key = MERGE_KEYS[name]
    given = {identity(key, item[key]): item for item in over}
    known = {identity(key, item[key]) for item in base}
    items = [_merged_item(name, item, given.get(identity(key, item[key]))) for item in base]
    return items + [item for item in over if identity(key, item[key]) not in known]


def _merged_item(name: str, item: dict[str, Any], over: dict[str, Any] | None) -> dict[str, Any]:
    if over is None:
        return item
    return over if name in _WHOLE else merged(item, over)
