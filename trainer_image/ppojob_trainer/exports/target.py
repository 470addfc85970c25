"""What an upload needs of a place for exports. `bucket_target.py` and `hub_target.py` implement it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MANIFEST = "ppojob-export.json"
"""The key that completes an export in a bucket; it is written last."""


@dataclass(frozen=True)
class Export:
    """A complete export in the storage."""

    folder: Path
    step: int
    uid: str
    """UID of the job that wrote it."""
    has_own_place: bool
    """Whether the job exports several steps, so that each has its own place at the target."""

    @property
    def place(self) -> str:
        """Name of its place below the target; empty: the target itself."""
        return f"step-{self.step}" if self.has_own_place else ""

    def files(self) -> Mapping[str, Path]:
        """Return the files by their names below the folder, in a fixed order."""
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        named = {path.relative_to(self.folder).as_posix(): path for path in found}
        return {name: path for name, path in named.items() if name != MANIFEST}


class Target(Protocol):
    """A place where exports are uploaded. Each call may raise `UploadError`."""

    def check(self, uid: str) -> None:
        """Find out whether a job may upload here. Leaves nothing behind."""
        ...

    def begin(self, export: Export) -> bool:
        """Prepare the place of an export; return False if the same export is there already, complete."""
        ...

    def add(self, name: str, path: Path) -> None:
        """Upload a file. May be called again for the same file."""
        ...

    def finish(self) -> str:
        """Make everything that was added since `begin` visible as a complete export; return its address."""
        ...
