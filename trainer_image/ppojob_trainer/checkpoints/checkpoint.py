"""One checkpoint: a folder that the ranks filled, sealed by a manifest with the size of every file.

`store.py` seals and reads; the engines write and read what lies beside the manifest. Sizes, not hashes: they find what
a kill, a full disk or a half copied folder leaves, at no cost; bit rot is the storage's business.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppojob_trainer.checkpoints import durable

MANIFEST = "manifest.json"


class BrokenFolderError(ValueError):
    """The folder is no whole checkpoint; the message says why. `store.py` adds what can be done."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    step: int
    path: Path
    uid: str
    """UID of the job that wrote it."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the controller needs to go on: position in the data, KL controller, ..."""


def seal(folder: Path, *, step: int, uid: str, state: Mapping[str, Any]) -> None:
    """Write the manifest and wait until the disk has the whole folder."""
    durable.write_json(
        folder / MANIFEST,
        {"step": step, "uid": uid, "time": time.time(), "state": dict(state), "files": _sizes(folder)},
    )
    durable.sync_tree(folder)


def read(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder`.

    Raises:
        BrokenFolderError: it is not there, or not whole.
    """
    manifest = read_manifest(folder)
    found = _sizes(folder)
    for name, size in manifest["files"].items():
        if name not in found:
            raise BrokenFolderError(f"{name} is missing")
        if found[name] != size:
            raise BrokenFolderError(f"{name} has {found[name]} bytes, {size} were written")
    return Checkpoint(step=manifest["step"], path=folder, uid=manifest["uid"], state=manifest["state"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what `seal` wrote: step, uid, state and the sizes of the files.

    Raises:
        BrokenFolderError: there is no manifest, or it is not what `seal` writes.
    """
    if not folder.is_dir():
        raise BrokenFolderError("there is no such folder")
    try:
        manifest = durable.read_json(folder / MANIFEST)
    except ValueError as error:
        raise BrokenFolderError(f"{MANIFEST} is no JSON object") from error
    if manifest is None:
        inside = sorted(path.name for path in folder.glob("**/step-*") if (path / MANIFEST).is_file())
        hint = f"; it holds {', '.join(inside)}: name one" if inside else ""
        raise BrokenFolderError(f"it has no {MANIFEST}{hint}")
    missing = {"step", "uid", "state", "files"} - set(manifest)
    if missing:
        raise BrokenFolderError(f"{MANIFEST} lacks {', '.join(sorted(missing))}")
    return manifest


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
