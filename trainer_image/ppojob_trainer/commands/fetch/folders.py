"""The folder of an address in the storage: complete with a marker, or in the making beside it.

    FOLDER                    complete, with MARKER in it: it appeared by a rename
    .NAME.incomplete          what a fetch has so far, beside it; the next one continues
    .NAME.lock                who fetches it

It deletes no complete folder: another job may be reading it.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

from ppojob_api.v1alpha1.reported import SourceStatus
from ppojob_api.v1alpha1.sources import Source
from ppojob_trainer.checkpoints.durable import read_json, sync, sync_tree, write_json
from ppojob_trainer.commands.fetch.errors import FetchRefusedError
from ppojob_trainer.commands.fetch.listing import METADATA, Listing

MARKER = ".ppojob-source.json"


class SourceFolder:
    """The folder of one address."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path = Path(source.folder)
        self.incomplete = self.path.with_name(f".{self.path.name}.incomplete")
        self.lock = self.path.with_name(f".{self.path.name}.lock")

    def found(self) -> SourceStatus | None:
        """Return what was fetched into it; None: it is not there.

        Raises:
            FetchRefusedError: it is there, but not what a fetch has left.
        """
        if not self.path.exists():
            return None
        try:
            marker = read_json(self.path / MARKER)
            if marker is None:
                raise ValueError(f"it has no {MARKER}")
            files: dict[str, int] = marker["files"]
            for name, size in files.items():
                if (self.path / name).stat().st_size != size:
                    raise ValueError(f"{name} does not have its {size} bytes")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchRefusedError(
                f"spec.{self.source.fields[0]} {self.source.address}: the folder {self.path} in the storage is not as "
                f"it was fetched ({error}): remove it, and create the job again"
            ) from error
        return self._status(marker.get("revision"), sum(files.values()))

    def begin(self, listing: Listing) -> None:
        """Prepare the folder beside it: what an earlier fetch has left stays, if it belongs to the listing."""
        self.incomplete.mkdir(parents=True, exist_ok=True)
        for path in (self.incomplete / METADATA).rglob("*.incomplete"):
            # Of a fetch that was killed: huggingface_hub never continues a file.
            path.unlink()
        names = {file.name for file in listing.files} | {file.remote for file in listing.files}
        for path in self._own_files():
            name = path.relative_to(self.incomplete).as_posix()
            if name not in names and not path.name.endswith(".incomplete"):
                path.unlink()

    def size(self) -> int:
        """Return the bytes that are there already."""
        total = 0
        for path in self.incomplete.rglob("*"):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:  # Downloads rename their files meanwhile.
                continue
        return total

    def publish(self, listing: Listing) -> SourceStatus:
        """Make it appear, complete."""
        shutil.rmtree(self.incomplete / METADATA, ignore_errors=True)
        for folder in sorted((path for path in self.incomplete.rglob("*") if path.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()
        content = {
            "address": self.source.address,
            "revision": listing.revision,
            "files": {file.name: file.size for file in listing.files},
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        write_json(self.incomplete / MARKER, content)
        sync_tree(self.incomplete)
        self.incomplete.rename(self.path)
        sync(self.path.parent)
        return self._status(listing.revision, listing.size)

    def _own_files(self) -> list[Path]:
        hidden = self.incomplete / METADATA
        return [path for path in self.incomplete.rglob("*") if path.is_file() and hidden not in path.parents]

    def _status(self, revision: str | None, size: int) -> SourceStatus:
        return SourceStatus(address=self.source.address, path=self.source.path, revision=revision, bytes=size)
