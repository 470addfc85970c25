"""Lists and reads the checkpoints in a folder or below an address, and checks whether they are complete.

Both stores read through it; the checkpoint that `checkpoint.resumeFrom` names may be in a folder or an object store.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Protocol

from ppojob_trainer.checkpoints import address as addresses
from ppojob_trainer.checkpoints.bucket import Bucket, connect
from ppojob_trainer.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    IncompleteCheckpointError,
    checked,
    no_manifest,
    parse_manifest,
)
from ppojob_trainer.checkpoints.errors import CheckpointUnreadableError

__all__ = ["BucketReader", "CheckpointReader", "FolderReader", "newest_complete", "order_of", "read", "read_at"]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)(?:\.attempt-(\d+))?")


class CheckpointReader(Protocol):
    """Reads the checkpoints in a folder or below an address."""

    def names(self) -> list[str]:
        """Return the names of the checkpoints, oldest first; they may be broken."""
        ...

    def read(self, name: str) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            IncompleteCheckpointError: it does not exist, or is incomplete.
        """
        ...

    def location(self, name: str) -> str:
        """Return its folder or address."""
        ...


class FolderReader:
    """Reads a folder: `step-8/`, and any other name that a user gives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """See `CheckpointReader`."""
        found = (path.name for path in self._folder.iterdir()) if self._folder.is_dir() else ()
        return sorted((name for name in found if re.fullmatch(r"step-\d+", name)), key=order_of)

    def read(self, name: str) -> Checkpoint:
        """See `CheckpointReader`."""
        folder = self._folder / name
        if not folder.is_dir():
            raise IncompleteCheckpointError("there is no such folder")
        try:
            manifest = parse_manifest((folder / MANIFEST).read_text())
        except FileNotFoundError as error:
            inside = (path.name for path in folder.glob("**/step-*") if (path / MANIFEST).is_file())
            raise no_manifest(inside) from error
        return checked(str(folder), manifest, file_sizes(folder))

    def location(self, name: str) -> str:
        """See `CheckpointReader`."""
        return str(self._folder / name)


class BucketReader:
    """Reads the keys below an address: `step-8.attempt-0/`. Files without a manifest are not a checkpoint yet."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def names(self) -> list[str]:
        """See `CheckpointReader`."""
        return self.complete_and_incomplete()[0]

    def complete_and_incomplete(self) -> tuple[list[str], list[str]]:
        """Return the names that have a manifest, and those that have none, both oldest first."""
        keys = self._bucket.sizes()
        names = sorted({name for name, slash, _ in (key.partition("/") for key in keys) if slash}, key=order_of)
        named = [name for name in names if _NAME.fullmatch(name)]
        complete = [name for name in named if f"{name}/{MANIFEST}" in keys]
        return complete, [name for name in named if name not in complete]

    def read(self, name: str) -> Checkpoint:
        """See `CheckpointReader`."""
        found = self._bucket.sizes(name)
        if not found:
            raise IncompleteCheckpointError("there is nothing below this address")
        manifest = self._bucket.read(f"{name}/{MANIFEST}" if name else MANIFEST)
        if manifest is None:
            inside = (key.split("/")[-2] for key in found if key.endswith(f"/{MANIFEST}"))
            raise no_manifest(inside)
        return checked(self.location(name), parse_manifest(manifest.content), found)

    def location(self, name: str) -> str:
        """See `CheckpointReader`."""
        return addresses.below(self._bucket.address, name) if name else self._bucket.address


def read(reader: CheckpointReader, name: str) -> Checkpoint:
    """Return a checkpoint of a folder or address.

    Raises:
        CheckpointUnreadableError: it is incomplete; the message offers the newest complete one before it.
    """
    try:
        return reader.read(name)
    except IncompleteCheckpointError as error:
        older = newest_complete(reader, before=order_of(name)[0]) if _NAME.fullmatch(name) else None
        raise CheckpointUnreadableError.of(reader.location(name), str(error), older=older) from error


def read_at(location: str) -> Checkpoint:
    """Return the checkpoint in a folder or at an address.

    Raises:
        CheckpointUnreadableError: it is incomplete.
    """
    if not addresses.is_address(location):
        path = Path(location)
        return read(FolderReader(path.parent), path.name)
    bucket, key = addresses.split(location)
    parent, _, name = key.rpartition("/")
    return read(BucketReader(connect(addresses.below(bucket, parent) if parent else bucket)), name)


def newest_complete(reader: CheckpointReader, *, before: int | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint, of an earlier step than `before`."""
    for name in reversed(reader.names()):
        if before is not None and order_of(name)[0] >= before:
            continue
        try:
            return reader.read(name)
        except IncompleteCheckpointError as error:
            _log.warning("%s is incomplete too: %s", reader.location(name), error)
    return None


def order_of(name: str) -> tuple[int, int]:
    """Return step and attempt of a checkpoint's name; -1 where the name has none."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or -1)) if found else (-1, -1)


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of all files below a folder, but for its manifest."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
