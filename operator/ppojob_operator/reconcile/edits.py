"""Finds differences between a live object and the desired one, in the fields that the operator sets.

`restoring` calls it. Additions are no difference: defaults of the API server, a queue's changes of pod templates,
sidecars. Neither are other notations: clients write quantities in their own way and omit empty values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_operator.manifests.pod_template import MERGE_KEYS

_KEYS = {**MERGE_KEYS, "workerGroupSpecs": "groupName"}
_AMOUNTS = {"requests", "limits", "sizeLimit", "divisor"}
"""Fields that are or contain quantities."""
_SECRETIVE = {"env", "args", "command", "annotations"}
"""Fields that may contain passwords: an Event names the field and not its value."""
_NOT_BY_DEFAULT = {
    *("automountServiceAccountToken", "enableServiceLinks", "allowPrivilegeEscalation", "hostUsers"),
    *("runAsUser", "runAsGroup", "fsGroup", "terminationGracePeriodSeconds", "tolerationSeconds"),
    *("defaultMode", "mode", "emptyDir", "labelSelector", "namespaceSelector"),
}
"""Fields whose absence differs from false, 0 or {}."""


def edits(desired: Mapping[str, Any], found: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a phrase for each field of `desired` that differs in `found`; `path` is the path of both.

    The order of scalars in a list matters. Objects in a list are matched by their key or, without one, at any position.
    """
    for name, value in desired.items():
        yield from _field(name, value, found.get(name), f"{path}.{name}", frozenset())


def _field(name: str, desired: Any, found: Any, path: str, within: frozenset[str]) -> Iterator[str]:
    """Yield the edits of one field; `within` has the parent fields that decide how it is compared."""
    within |= {name} & (_AMOUNTS | _SECRETIVE)
    if found is None:
        if desired or name in _NOT_BY_DEFAULT:
            yield f"{path} was removed"
    elif isinstance(desired, Mapping) and isinstance(found, Mapping):
        for each, value in desired.items():
            yield from _field(each, value, found.get(each), f"{path}.{each}", within)
    elif _has_objects(desired) and isinstance(found, list):
        yield from _items(desired, found, path, _KEYS.get(name), within)
    elif not _is_same(desired, found, is_amount=bool(within & _AMOUNTS)):
        shows_values = not within & _SECRETIVE and not isinstance(desired, Mapping) and not _has_objects(desired)
        yield f"{path} was {found} instead of {desired}" if shows_values else f"{path} was changed"


def _items(
    desired: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    path: str,
    key: str | None,
    within: frozenset[str],
) -> Iterator[str]:
    for index, item in enumerate(desired):
        here = f"{path}[{index if key is None else item.get(key)}]"
        same_name = [each for each in found if key is None or each.get(key) == item.get(key)]
        # Several may have the name: ports also differ by protocol.
        differences = [list(_field("", item, each, here, within)) for each in same_name]
        if not differences:
            yield f"{here} was removed"
        elif all(differences):
            yield from min(differences, key=len)


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _is_same(desired: Any, found: Any, *, is_amount: bool) -> bool:
    return bool(desired == found or (is_amount and _amount(desired) == _amount(found)))


def _amount(value: Any) -> Any:
    """Return a quantity as a number: 500m and 0.5 are equal."""
    try:
        return parse_quantity(str(value))
    except ValueError:
        return value
