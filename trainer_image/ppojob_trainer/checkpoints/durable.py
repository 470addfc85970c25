"""Files that survive a kill or a power cut: written to a temporary file, flushed to disk, then renamed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` atomically: at any moment it has either the old or the new content, complete and on disk."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in the file; None where there is no file.

    Raises:
        ValueError: the file holds something else than a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def sync(path: Path) -> None:
    """Wait until the disk has the file, or the folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until the disk has every file and folder below `folder`, and itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
