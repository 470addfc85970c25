"""One checkpoint: the files of the ranks, completed by a manifest with the size of every file.

`folder_store.py` and `bucket_store.py` write and read the manifest; the engines write and read the other files. The
manifest has sizes, not hashes: they detect the result of a kill, a full disk or an incomplete copy at no cost. Bit rot
is left to the storage.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MANIFEST = "manifest.json"


class IncompleteCheckpointError(ValueError):
    """The checkpoint is incomplete; the message says why. `readers.py` adds the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    location: str
    """Its folder, or its address in an object store."""
    uid: str
    """UID of the job that wrote it."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The controller's state to resume from: position in the data, KL controller, ..."""


def manifest_of(*, step: int, uid: str, state: Mapping[str, Any], files: Mapping[str, int]) -> dict[str, Any]:
    """Return the manifest; `files` has the size of each file in bytes."""
    return {"step": step, "uid": uid, "time": time.time(), "state": dict(state), "files": dict(files)}


def parse_manifest(text: bytes | str) -> dict[str, Any]:
    """Return the manifest that `manifest_of` created.

    Raises:
        IncompleteCheckpointError: the text is not such a manifest.
    """
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise IncompleteCheckpointError(f"{MANIFEST} is not a JSON object") from error
    if not isinstance(manifest, dict):
        raise IncompleteCheckpointError(f"{MANIFEST} is not a JSON object")
    missing = {"step", "uid", "state", "files"} - set(manifest)
    if missing:
        raise IncompleteCheckpointError(f"{MANIFEST} lacks {', '.join(sorted(missing))}")
    return manifest


def checked(location: str, manifest: Mapping[str, Any], found: Mapping[str, int]) -> Checkpoint:
    """Return the checkpoint if the found files are those of the manifest.

    Raises:
        IncompleteCheckpointError: one is missing, or has another size.
    """
    for name, size in manifest["files"].items():
        if name not in found:
            raise IncompleteCheckpointError(f"{name} is missing")
        if found[name] != size:
            raise IncompleteCheckpointError(f"{name} has {found[name]} bytes, {size} were written")
    return Checkpoint(step=manifest["step"], location=location, uid=manifest["uid"], state=manifest["state"])


def no_manifest(inside: Iterable[str]) -> IncompleteCheckpointError:
    """Return the error for a folder or address without a manifest; `inside`: names of the checkpoints below it."""
    names = sorted(inside)
    hint = f"; it contains {', '.join(names)}: name one of them" if names else ""
    return IncompleteCheckpointError(f"it has no {MANIFEST}{hint}")
