"""Models and data in a bucket: the keys below a prefix, or one key.

A download continues where it was cut off, if the key has the same version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ppojob_api.v1alpha1.sources import Source, SourceKind
from ppojob_trainer.checkpoints.bucket import ChangedMeanwhileError, connect
from ppojob_trainer.checkpoints.errors import BucketError, BucketRefusedError
from ppojob_trainer.commands.fetch.errors import FetchError, FetchRefusedError, of_storage
from ppojob_trainer.commands.fetch.listing import METADATA, Listing, RemoteFile, refuse_unsafe


class BucketPlace:
    """One address in a bucket."""

    def __init__(self, source: Source) -> None:
        self._source = source
        with _named_errors():
            self._bucket = connect(source.address, f"spec.{source.fields[0]}")

    def listing(self) -> Listing:
        """Return the keys below the address, or the key that it is."""
        with _named_errors():
            if self._source.kind is SourceKind.DATA_FILE:
                return Listing(None, self._one_file())
            # What consoles create to show a folder is an empty key with a slash at its end.
            sizes = {name: size for name, size in self._bucket.sizes().items() if name and not name.endswith("/")}
        if not sizes:
            raise FetchRefusedError(f"{self._where}: there is nothing below this address: correct it")
        refuse_unsafe(list(sizes), self._source.address)
        return Listing(None, tuple(RemoteFile(name, name, size) for name, size in sizes.items()))

    def download(self, file: RemoteFile, listing: Listing, folder: Path, check: Callable[[], None]) -> None:
        """Put a key into a folder. What an earlier try has of the same version is kept."""
        path = folder / file.name
        with _named_errors():
            found = self._bucket.version(file.remote)
        if found is None or found[0] != file.size:
            raise FetchError(f"{self._where}: {file.name} changed while it was being fetched")
        try:
            self._append(file, found[1], path, folder / METADATA / "versions" / file.name, check)
        except ChangedMeanwhileError as error:
            raise FetchError(f"{self._where}: {file.name} changed while it was being fetched") from error
        except OSError as error:
            raise of_storage(error, self._where) from error

    def _append(self, file: RemoteFile, e_tag: str, path: Path, version_of: Path, check: Callable[[], None]) -> None:
        if path.exists() and version_of.exists() and version_of.read_text() == e_tag:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        version_of.parent.mkdir(parents=True, exist_ok=True)
        version = hashlib.sha256(e_tag.encode()).hexdigest()[:12]
        part = path.with_name(f".{path.name}.{version}.incomplete")
        offset = part.stat().st_size if part.exists() else 0
        with part.open("ab") as written, _named_errors():
            if offset < file.size:
                for chunk in self._bucket.stream(file.remote, offset=offset, e_tag=e_tag):
                    check()
                    written.write(chunk)
            written.flush()
            os.fsync(written.fileno())
        if part.stat().st_size != file.size:
            size = part.stat().st_size
            part.unlink()
            raise FetchError(f"{self._where}: {file.name} has {file.size} bytes, and {size} arrived")
        version_of.unlink(missing_ok=True)
        part.replace(path)
        version_of.write_text(e_tag)

    def _one_file(self) -> tuple[RemoteFile, ...]:
        found = self._bucket.version()
        if found is None:
            raise FetchRefusedError(f"{self._where}: there is no such object: correct the address")
        return (RemoteFile(Path(self._source.path).name, "", found[0]),)

    @property
    def _where(self) -> str:
        return f"spec.{self._source.fields[0]} {self._source.address}"


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except BucketRefusedError as error:
        raise FetchRefusedError(str(error)) from error
    except BucketError as error:
        raise FetchError(str(error)) from error
