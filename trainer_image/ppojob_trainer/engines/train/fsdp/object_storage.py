"""The files of a checkpoint as torch reads and writes them: in a folder, or in an object store (`s3://`, `gs://`).

`checkpoint.py` asks here for reader and writer. In an object store a file is one upload, which the store shows whole or
not at all; nothing is renamed but the small `.metadata`, which is written last. Every rank reads and writes by itself.

torch's writer keeps what it copied from the device until the file is finished, so a rank writes several files of at
most `FILE_BYTES` (or of one tensor). Beside that it holds one part of an upload, or what is read ahead.

torch's own `FsspecReader` was tried with obstore's fsspec files: these read past the end of a part, and what is loaded
is not what was saved.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ppojob_trainer.checkpoints import BucketError
from ppojob_trainer.checkpoints.address import is_address
from ppojob_trainer.checkpoints.bucket import Bucket, connect, said

__all__ = ["ObjectStoreError", "has_metadata", "is_of_store", "is_used", "reader_of", "writer_of"]

FILE_BYTES: Final = 2**30
_READ_AHEAD = 8 * 1024 * 1024
_PART = 8 * 1024 * 1024
_METADATA = ".metadata"


class ObjectStoreError(OSError):
    """The store did not answer, refused or failed; a key that is not there is a FileNotFoundError."""


def is_of_store(error: BaseException) -> bool:
    """Return whether the store failed for one of the ranks; the stored checkpoint may still be valid."""
    if isinstance(error, CheckpointException):
        return any(isinstance(cause, ObjectStoreError) for cause, _ in error.failures.values())
    return isinstance(error, ObjectStoreError)


def reader_of(location: str | Path) -> FileSystemReader:
    """Return the reader for a checkpoint in a folder or at an address.

    Raises:
        ObjectStoreError: the object store cannot be used.
    """
    return _ObjectReader(_connected(str(location))) if is_address(str(location)) else FileSystemReader(location)


def writer_of(location: str | Path) -> FileSystemWriter:
    """Return the writer for a checkpoint into a new folder or below a new address.

    Raises:
        ObjectStoreError: the object store cannot be used.
    """
    return _ObjectWriter(_connected(str(location))) if is_address(str(location)) else _Writer(location)


def has_metadata(location: str | Path) -> bool:
    """Return whether a checkpoint has the file that is written last.

    Raises:
        ObjectStoreError: the object store cannot be used.
    """
    if is_address(str(location)):
        bucket = _connected(str(location))
        return ObjectFiles(bucket.store).exists(f"{bucket.prefix}/{_METADATA}")
    return Path(location, _METADATA).is_file()


def is_used(location: str | Path) -> bool:
    """Return whether there is something in the folder or below the address.

    Raises:
        ObjectStoreError: the object store cannot be used.
    """
    if is_address(str(location)):
        bucket = _connected(str(location))
        return bool(ObjectFiles(bucket.store).ls(bucket.prefix))
    return Path(location).exists() and any(Path(location).iterdir())


class _ObjectReader(FileSystemReader):
    """Reads a checkpoint below an address."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket.prefix)
        # torch declares a FileSystem and calls what its base class has.
        self.fs: FileSystemBase = ObjectFiles(bucket.store)  # type: ignore[assignment]
        self.path = bucket.prefix


class _Writer(FileSystemWriter):
    """Writes a rank's part of a checkpoint one tensor after the other, into files of at most `FILE_BYTES`."""

    def __init__(self, path: str | Path, *, sync_files: bool = True) -> None:
        # To copy ahead, torch allocates pinned memory in powers of two and keeps it.
        super().__init__(path, sync_files=sync_files, thread_count=1, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter`."""
        written: list[WriteResult] = []
        for number, items in enumerate(_in_files(plan.items)):
            storage = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = replace(plan, items=items, storage_data=storage)
            written += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


def _in_files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield the items of each file."""
    together: list[WriteItem] = []
    size = 0
    for item in items:
        num_bytes = _num_bytes(item)
        if together and size + num_bytes > FILE_BYTES:
            yield together
            together, size = [], 0
        together.append(item)
        size += num_bytes
    if together:
        yield together


def _num_bytes(item: WriteItem) -> int:
    """Return the bytes of this rank's part of a tensor."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class _ObjectWriter(_Writer):
    """Writes a checkpoint below an address; there must be nothing yet."""

    def __init__(self, bucket: Bucket) -> None:
        # There is no disk to wait for: a finished upload is safe.
        super().__init__(bucket.prefix, sync_files=False)
        # torch declares a FileSystem and calls what its base class has.
        self.fs: FileSystemBase = ObjectFiles(bucket.store)  # type: ignore[assignment]
        self.path = bucket.prefix


class ObjectFiles(FileSystemBase):
    """The keys of a store as torch's readers and writers see files. There are no folders."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a key: to read it from anywhere, or to write it from its beginning. One that fails is not there."""
        with _as_os_errors():
            if "r" in mode:
                with io.BufferedReader(_Parts(self._store, str(path)), _READ_AHEAD) as stream:
                    yield stream
            else:
                # If the block raises, the writer aborts the upload.
                with obstore.open_writer(self._store, str(path)) as writer:
                    yield _Upload(writer)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return a key below another."""
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the key as it is."""
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Copy a key, then delete it."""
        with _as_os_errors():
            obstore.rename(self._store, str(path), str(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether there is such a key."""
        try:
            with _as_os_errors():
                obstore.head(self._store, str(path))
        except FileNotFoundError:
            return False
        return True

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Delete a key."""
        with _as_os_errors():
            obstore.delete(self._store, str(path))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Return all keys below another."""
        with _as_os_errors():
            return [found["path"] for page in obstore.list(self._store, prefix=str(path)) for found in page]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: torch always receives the reader and writer explicitly."""
        return False


class _Parts(io.RawIOBase):
    """A key, read by ranges of bytes."""

    # A request has to end within obstore's own limit of time (30 s), so a large tensor takes several.
    _LARGEST = 16 * 1024 * 1024

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key, self._position = store, key, 0
        self._size: int = obstore.head(store, key)["size"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._LARGEST, self._size - self._position))
        if length:
            found = obstore.get_range(self._store, self._key, start=self._position, length=length)
            buffer[:length] = memoryview(found)
            self._position += length
        return length


class _Upload(io.RawIOBase):
    """A writer of obstore's that knows its position, which torch notes for each tensor."""

    def __init__(self, writer: Any) -> None:
        self._writer, self._position = writer, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        # A tensor comes in one piece, and obstore takes copies.
        for start in range(0, len(data), _PART):
            self._writer.write(bytes(data[start : start + _PART]))
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position


def _connected(address: str) -> Bucket:
    try:
        return connect(address)
    except BucketError as error:
        raise ObjectStoreError(str(error)) from error


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise errors of the store as OSError, like errors of a disk, without the body of the answer."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(said(error)) from error
    except BaseError as error:
        raise ObjectStoreError(said(error)) from error
