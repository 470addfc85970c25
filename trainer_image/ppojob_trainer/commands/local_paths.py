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
    ("model", "reward", "path"),
    ("data", "train", "files", "paths"),
    ("data", "validation", "files", "paths"),
    ("data", "train", "huggingFace", "path"),
    ("data", "validation", "huggingFace", "path"),
    ("reward", "function", "path"),
    ("checkpoint", "resumeFrom"),
)
"""Every field of the spec that is a path in the container; `workers[].path` is one too."""


def localize(spec: PPOJobSpec, storages: Sequence[Path]) -> PPOJobSpec:
    """Return the spec with each path below the mount path replaced by the local one.

    Args:
        storages: folders that stand for the volume, in the order in which they are searched.

    Raises:
        SpecError: a path exists in none of the places; the message says how to give another.
    """
    raw = spec.to_wire()
    errors: list[FieldError] = []
    for field in (*_FIELDS, *(("workers", index, "path") for index in range(len(spec.workers)))):
        holder = _holder(raw, field)
        name = str(field[-1])
        if holder is None or name not in holder:
            continue
        given = holder[name]
        places = [_Place(field, path, spec.storage.mount_path, storages) for path in _as_list(given)]
        errors += [place.error for place in places if place.found is None]
        found = [place.found or place.given for place in places]
        holder[name] = found if isinstance(given, list) else found[0]
    if errors:
        raise SpecError(errors)
    return PPOJobSpec.model_validate(raw)


class _Place:
    """One path, and where it is on this machine."""

    def __init__(self, field: tuple[str | int, ...], given: str, mount_path: str, storages: Sequence[Path]) -> None:
        self.given = given
        self._field = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)
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


def _holder(raw: dict[str, Any], field: tuple[str | int, ...]) -> dict[str, Any] | None:
    node: Any = raw
    for part in field[:-1]:
        node = node[part] if isinstance(part, int) else node.get(part)
        if node is None:
            return None
    return cast("dict[str, Any]", node)


def _as_list(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]
