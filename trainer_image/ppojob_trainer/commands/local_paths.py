"""The paths of a PPOJob on a machine without its volume.

In a cluster `spec.storage.mountPath` is where the pods see the claim; `ppojob run` looks for such a path here as it is,
then in local folders that stand for the volume. A path that is nowhere is refused before anything starts.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import FieldError, SpecError

_FIELDS = (
    ("model", "actor", "path"),
    ("model", "critic", "path"),
    ("model", "ref", "path"),
    ("data", "train", "files", "paths"),
    ("data", "validation", "files", "paths"),
    ("data", "train", "huggingFace", "path"),
    ("data", "validation", "huggingFace", "path"),
    ("reward", "function", "path"),
    ("checkpoint", "resumeFrom"),
)
"""Every field of the spec that is a path in the container."""


def localize(spec: PPOJobSpec, storages: Sequence[Path]) -> PPOJobSpec:
    """Return the spec with each path below the mount path replaced by the local one.

    Args:
        storages: folders that stand for the volume, in the order in which they are searched.

    Raises:
        SpecError: a path exists in none of the places; the message says how to give another.
    """
    raw = spec.to_wire()
    errors: list[FieldError] = []
    for field in _FIELDS:
        holder = _holder(raw, field)
        if holder is None or field[-1] not in holder:
            continue
        given = holder[field[-1]]
        places = [_Place(field, path, spec.storage.mount_path, storages) for path in _as_list(given)]
        errors += [place.error for place in places if place.found is None]
        found = [place.found or place.given for place in places]
        holder[field[-1]] = found if isinstance(given, list) else found[0]
    if errors:
        raise SpecError(errors)
    return PPOJobSpec.model_validate(raw)


class _Place:
    """One path, and where it is on this machine."""

    def __init__(self, field: tuple[str, ...], given: str, mount_path: str, storages: Sequence[Path]) -> None:
        self.given = given
        self._field = ".".join(("spec", *field))
        path = PurePosixPath(given)
        is_in_volume = path.is_relative_to(mount_path)
        below = path.relative_to(mount_path) if is_in_volume else path
        self._candidates = [Path(given), *(storage / below for storage in storages if is_in_volume)]
        # A relative name may be one of a hub: whether it exists is the loader's question.
        is_name = not path.is_absolute()
        self.found = next((str(place.absolute()) for place in self._candidates if place.exists()), None)
        self.found = given if self.found is None and is_name else self.found

    @property
    def error(self) -> FieldError:
        looked = ", ".join(map(str, self._candidates))
        return FieldError(
            self._field, self.given, f"is not on this machine (looked at {looked}): use --set {self._field}=<path here>"
        )


def _holder(raw: dict[str, Any], field: tuple[str, ...]) -> dict[str, Any] | None:
    node: Any = raw
    for part in field[:-1]:
        node = node.get(part)
        if node is None:
            return None
    return cast("dict[str, Any]", node)


def _as_list(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]
