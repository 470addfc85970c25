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
    BrokenCheckpointError,
    Checkpoint,
    no_manifest,
    parse_manifest,
    whole,
)
from ppojob_trainer.checkpoints.errors import CheckpointUnreadableError

__all__ = ["BucketShelf", "FolderShelf", "Shelf", "newest_whole", "order_of", "read", "read_at"]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)(?:\.attempt-(\d+))?")


class Shelf(Protocol):
    """A folder or an address with checkpoints."""

    def names(self) -> list[str]:
        """Return the names of the checkpoints, oldest first; they may be broken."""
        ...

    def read(self, name: str) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            BrokenCheckpointError: it is not there, or not whole.
        """
        ...

    def location(self, name: str) -> str:
        """Return its folder or address."""
        ...


class FolderShelf:
    """A folder: `step-8/`, and whatever else a user names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """See `Shelf`."""
        found = (path.name for path in self._folder.iterdir()) if self._folder.is_dir() else ()
        return sorted((name for name in found if re.fullmatch(r"step-\d+", name)), key=order_of)

    def read(self, name: str) -> Checkpoint:
        """See `Shelf`."""
        folder = self._folder / name
        if not folder.is_dir():
            raise BrokenCheckpointError("there is no such folder")
        try:
            manifest = parse_manifest((folder / MANIFEST).read_text())
        except FileNotFoundError as error:
            inside = (path.name for path in folder.glob("**/step-*") if (path / MANIFEST).is_file())
            raise no_manifest(inside) from error
        return whole(str(folder), manifest, file_sizes(folder))

    def location(self, name: str) -> str:
        """See `Shelf`."""
        return str(self._folder / name)


class BucketShelf:
    """The keys below an address: `step-8.attempt-0/`. Files without a manifest are not a checkpoint yet."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def names(self) -> list[str]:
        """See `Shelf`."""
        return self.sorted_by_seal()[0]

    def sorted_by_seal(self) -> tuple[list[str], list[str]]:
        """Return the names that have a manifest, and those that have none, both oldest first."""
        keys = self._bucket.sizes()
        names = sorted({name for name, slash, _ in (key.partition("/") for key in keys) if slash}, key=order_of)
        named = [name for name in names if _NAME.fullmatch(name)]
        sealed = [name for name in named if f"{name}/{MANIFEST}" in keys]
        return sealed, [name for name in named if name not in sealed]

    def read(self, name: str) -> Checkpoint:
        """See `Shelf`."""
        found = self._bucket.sizes(name)
        if not found:
            raise BrokenCheckpointError("there is nothing below this address")
        manifest = self._bucket.read(f"{name}/{MANIFEST}" if name else MANIFEST)
        if manifest is None:
            inside = (key.split("/")[-2] for key in found if key.endswith(f"/{MANIFEST}"))
            raise no_manifest(inside)
        return whole(self.location(name), parse_manifest(manifest.content), found)

    def location(self, name: str) -> str:
        """See `Shelf`."""
        return addresses.below(self._bucket.address, name) if name else self._bucket.address


def read(shelf: Shelf, name: str) -> Checkpoint:
    """Return a checkpoint of a shelf.

    Raises:
        CheckpointUnreadableError: it is not whole; the message offers the newest whole one before it.
    """
    try:
        return shelf.read(name)
    except BrokenCheckpointError as error:
        older = newest_whole(shelf, before=order_of(name)[0]) if _NAME.fullmatch(name) else None
        raise CheckpointUnreadableError.of(shelf.location(name), str(error), older=older) from error


def read_at(location: str) -> Checkpoint:
    """Return the checkpoint in a folder or at an address.

    Raises:
        CheckpointUnreadableError: it is not whole.
    """
    if not addresses.is_address(location):
        path = Path(location)
        return read(FolderShelf(path.parent), path.name)
    bucket, key = addresses.split(location)
    parent, _, name = key.rpartition("/")
    return read(BucketShelf(connect(addresses.below(bucket, parent) if parent else bucket)), name)


def newest_whole(shelf: Shelf, *, before: int | None = None) -> Checkpoint | None:
    """Return the newest whole checkpoint, of an earlier step than `before`."""
    for name in reversed(shelf.names()):
        if before is not None and order_of(name)[0] >= before:
            continue
        try:
            return shelf.read(name)
        except BrokenCheckpointError as error:
            _log.warning("%s is not whole either: %s", shelf.location(name), error)
    return None


def order_of(name: str) -> tuple[int, int]:
    """Return step and attempt of a checkpoint's name; -1 where the name has none."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or -1)) if found else (-1, -1)


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of all files below a folder, but for its manifest."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
