"""What does an object that lives lack of what was desired? Every field that we set is compared, and no other.

`restoring` calls it. What others add is left alone: the API server's defaults, what a queue writes into pod templates,
a sidecar. So is what means the same: clients write quantities otherwise and leave empty values out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_operator.manifests.pod_template import MERGE_KEYS

_KEYS = {**MERGE_KEYS, "workerGroupSpecs": "groupName"}
_AMOUNTS = {"requests", "limits", "sizeLimit", "divisor"}
"""What is, or holds, quantities."""
_SECRETIVE = {"env", "args", "command", "annotations"}
"""Where people write passwords: an Event names the field and not the value."""
_NOT_BY_DEFAULT = {
    *("automountServiceAccountToken", "enableServiceLinks", "allowPrivilegeEscalation", "hostUsers"),
    *("runAsUser", "runAsGroup", "fsGroup", "terminationGracePeriodSeconds", "tolerationSeconds"),
    *("defaultMode", "mode", "emptyDir", "labelSelector", "namespaceSelector"),
}
"""Fields that mean something else when they are missing than when they are false, 0 or {}."""


def edits(desired: Mapping[str, Any], found: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a phrase for each field at which `found` is not as desired; `path` is that of both.

    Scalars in a list count with their order. Objects in a list are known by their name or, where they have none, found
    wherever they stand.
    """
    for name, value in desired.items():
        yield from _field(name, value, found.get(name), f"{path}.{name}", frozenset())


def _field(name: str, desired: Any, found: Any, path: str, within: frozenset[str]) -> Iterator[str]:
    """Yield the edits of one field; `within` are the fields around it that say how it is read."""
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
        is_said = not within & _SECRETIVE and not isinstance(desired, Mapping) and not _has_objects(desired)
        yield f"{path} was {found} in place of {desired}" if is_said else f"{path} was changed"


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
        # More than one may have the name: a port is known by its protocol too.
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
    """Return a quantity in one way of writing: a client may have put 500m for 0.5."""
    try:
        return parse_quantity(str(value))
    except ValueError:
        return value
