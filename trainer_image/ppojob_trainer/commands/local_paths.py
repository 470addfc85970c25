"""The paths of a PPOJob on a machine without its volume.

In a cluster `spec.storage.mountPath` is where the pods see the claim; `ppojob run` looks for such a path here as it is,
then in local folders that stand for the volume. A path that is nowhere is refused before anything starts. Addresses
stay: what they name is fetched.
"""

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ppojob_api.v1alpha1.sources import is_address, is_repository_name
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import FieldError, SpecError

_FIELDS = (
    ("model", "actor", "path"),
    ("model", "critic", "path"),
    ("model", "ref", "path"),
    ("model", "reward", "path"),
    ("reward", "function", "path"),
    ("algorithm", "advantageFunction", "path"),
    ("algorithm", "policyLossFunction", "path"),
    ("actor", "engineClass", "path"),
    ("critic", "engineClass", "path"),
    ("checkpoint", "resumeFrom"),
)
_IN_SOURCE = (("files", "paths"), ("huggingFace", "path"))


def with_absolute_paths(raw: Any, folder: Path) -> Any:
    """Return a raw PPOJob with its relative paths made absolute, as paths below `folder`.

    Addresses stay.
    """
    raw = deepcopy(raw)
    spec = raw.get("spec") if isinstance(raw, dict) else None
    for field in _fields(spec):
        holder, name = _holder(spec, field), str(field[-1])
        if not isinstance(holder, dict):
            continue
        given = holder.get(name)
        if isinstance(given, list):
            holder[name] = [_absolute(path, folder) for path in given]
        elif isinstance(given, str):
            holder[name] = _absolute(given, folder)
    return raw


def _fields(spec: Any) -> Iterator[tuple[str | int, ...]]:
    """Yield every field of a raw spec that is a path in the container. The spec may be wrong in any way."""
    yield from _FIELDS
    yield from (("workers", index, "path") for index in _indices(spec, ("workers",)))
    mixture = ("data", "train", "mixture")
    sources = (("data", "train"), ("data", "validation"), *((*mixture, index) for index in _indices(spec, mixture)))
    yield from ((*source, *field) for source in sources for field in _IN_SOURCE)


def _indices(spec: Any, place: tuple[str, ...]) -> range:
    holder = _holder(spec, place)
    given = holder.get(place[-1]) if isinstance(holder, dict) else None
    return range(len(given)) if isinstance(given, list) else range(0)


def _absolute(path: Any, folder: Path) -> Any:
    return path if not isinstance(path, str) or is_address(path) else str((folder / path).absolute())


def localize(spec: PPOJobSpec, storages: Sequence[Path]) -> PPOJobSpec:
    """Return the spec with each path below the mount path replaced by the local one.

    Args:
        storages: folders that stand for the volume, in the order in which they are searched.

    Raises:
        SpecError: a path exists in none of the places; the message says how to give another.
    """
    raw = spec.to_wire()
    errors: list[FieldError] = []
    for field in _fields(raw):
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
        self._may_be_a_repository = field[0] == "model" or "huggingFace" in field
        self._field = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)
        path = PurePosixPath(given)
        is_in_volume = path.is_relative_to(mount_path)
        below = path.relative_to(mount_path) if is_in_volume else path
        self._candidates = [Path(given), *(storage / below for storage in storages if is_in_volume)]
        found = next((str(place.absolute()) for place in self._candidates if place.exists()), None)
        self.found = given if is_address(given) else found

    @property
    def error(self) -> FieldError:
        looked = ", ".join(map(str, self._candidates))
        words = f"is not on this machine (looked at {looked}): use --set {self._field}=<path here>"
        # A relative path was made absolute.
        name = os.path.relpath(self.given)
        if self._may_be_a_repository and is_repository_name(name):
            words += f"; if it is a repository of the Hugging Face Hub, write hf://{name}"
        return FieldError(self._field, self.given, words)


def _holder(raw: Any, field: tuple[str | int, ...]) -> dict[str, Any] | None:
    node = raw
    for part in field[:-1]:
        if isinstance(part, int) and isinstance(node, list):
            node = node[part]
        elif isinstance(part, str) and isinstance(node, dict):
            node = node.get(part)
        else:
            return None
    return cast("dict[str, Any] | None", node)


def _as_list(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]
