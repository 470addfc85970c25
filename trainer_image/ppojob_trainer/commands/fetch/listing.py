"""What both kinds of places offer, the hub and buckets: a list of files, and a download of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from ppojob_trainer.commands.fetch.errors import FetchRefusedError

METADATA = ".cache"
"""Folder beside the files, where a download remembers which version it has; huggingface_hub's name for it."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to download."""

    name: str
    """Its path in the local folder."""
    remote: str
    """Its name where it comes from; empty: the address itself."""
    size: int


@dataclass(frozen=True)
class Listing:
    """The files that an address stands for."""

    revision: str | None
    """Commit of the repository. None: it is not a repository."""
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Place(Protocol):
    """Where the files of one address are."""

    def listing(self) -> Listing:
        """Return its files.

        Raises:
            FetchError: it cannot be listed; FetchRefusedError if another try cannot help.
        """
        ...

    def download(self, file: RemoteFile, listing: Listing, folder: Path, check: Callable[[], None]) -> None:
        """Put a file into a folder, complete.

        Args:
            check: called from time to time; what it raises ends the download.

        Raises:
            FetchError: it could not be downloaded; FetchRefusedError if another try cannot help.
        """
        ...


def refuse_unsafe(names: list[str], address: str) -> None:
    """Refuse names that would lead out of the folder.

    Raises:
        FetchRefusedError: names the file.
    """
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise FetchRefusedError(f"{address} has a file named {name!r}, which is not a name below a folder")
