"""Tables in the storage that are computed once and read through a memory map.

    KEY.arrow                  an Arrow IPC file, complete: it appeared by a rename
    .KEY.RANDOM.incomplete     a build that is running or was interrupted; nobody reads it
    .KEY.lock                  who builds it

The key names everything that the table depends on, so a file is never updated. Called by the sources and by `tokens`.
It deletes no complete file: another job may be reading it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from ppojob_trainer.storage_lock import LockTimes, StorageLock

logger = logging.getLogger(__name__)

Batches = Callable[[], Iterable[pa.RecordBatch]]


class CachedTable(NamedTuple):
    """A table, and whether it is mapped from a file, so that other processes can open it without another copy."""

    rows: pa.Table
    is_mapped: bool


@dataclass(frozen=True)
class TableCache:
    """Tables by their keys.

    folder: where the files are; None: tables stay in memory. holder: name of this process, for others that wait.
    """

    folder: Path | None = None
    holder: str = ""
    times: LockTimes | None = None

    def table(self, identity: Mapping[str, Any], title: str, schema: pa.Schema, batches: Batches) -> CachedTable:
        """Return a table, computed if it is not there.

        If the folder cannot be written, a warning says so and the table is kept in memory.

        Args:
            identity: everything that the table depends on, as JSON.
            title: what log lines call it.
            batches: computes it. Its errors are raised; they are no errors of the storage.
        """
        if self.folder is None:
            return CachedTable(pa.Table.from_batches(batches(), schema), is_mapped=False)
        path = self.folder / f"{_key(identity)}.arrow"
        if (found := _opened(path)) is not None:
            return CachedTable(found, is_mapped=True)
        try:
            with StorageLock(path.with_name(f".{path.stem}.lock"), self.holder, self.times).held(_Waits(title)):
                # The previous holder of the lock may have built it.
                found = _opened(path)
                found = _built(path, schema, batches) if found is None else found
                return CachedTable(found, is_mapped=True)
        except OSError as error:
            text = "%s: the cache %s cannot be written, so the data is kept in memory and prepared at each start: %s"
            logger.warning(text, title, self.folder, error)
        return CachedTable(pa.Table.from_batches(batches(), schema), is_mapped=False)


NO_CACHE = TableCache()
"""Tables stay in memory."""


class _Waits:
    """Logs once for whom a lock is waited."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._logged = ""

    def __call__(self, holder: str) -> None:
        if holder != self._logged:
            self._logged = holder
            logger.info("%s: waiting for %s, which prepares the same data", self._title, holder)


def _key(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _opened(path: Path) -> pa.Table | None:
    """Return the table in a file, without reading its rows; None: there is none."""
    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        logger.warning("%s cannot be read and is built again: %s", path, error)
        return None


def _built(path: Path, schema: pa.Schema, batches: Batches) -> pa.Table:
    for left in path.parent.glob(f".{path.stem}.*.incomplete"):
        # If its process was only suspended, its rename fails.
        left.unlink()
    incomplete = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.incomplete")
    try:
        with incomplete.open("xb") as file:
            _write(file, schema, batches())
            file.flush()
            os.fsync(file.fileno())
        incomplete.rename(path)
    except BaseException:
        with suppress(OSError):
            incomplete.unlink()
        raise
    found = _opened(path)
    if found is None:
        raise OSError(f"{path} is unreadable right after it was written")
    return found


def _write(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
