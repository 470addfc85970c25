"""Rows of files by number, without holding them in memory. Called by `parquet_jsonl`.

Parquet has no access to single rows: it is converted once into the cache, whose memory-mapped pages the kernel can drop
at any time. JSON Lines are read in place: only the offset of each line is kept, 8 bytes a row.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from ppojob_trainer.data.cache import CachedTable, TableCache
from ppojob_trainer.data.errors import DataError

_ROWS_PER_BATCH = 8192
_FORMAT = 1
"""Part of the key: raise it if the same file gives other rows."""
_SCANNED = 1 << 24
"""Bytes in which line ends are searched at a time."""
_BLANKS = np.frombuffer(b" \t\r", dtype=np.uint8)


class ArrowRows(Sequence[Any]):
    """Rows of an Arrow table as dictionaries, made when asked for."""

    def __init__(self, table: CachedTable) -> None:
        self._table = table.rows
        self.is_mapped = table.is_mapped

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def parquet_rows(path: str, columns: Sequence[str], cache: TableCache) -> ArrowRows:
    """Return the rows of a Parquet file.

    Args:
        columns: which are read, where the file has them.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        given = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    schema = pa.schema([_plain(given.field(name)) for name in given.names if name in columns])
    identity = {"rows": _FORMAT, "file": file_identity(path), "columns": schema.names}
    return ArrowRows(cache.table(identity, path, schema, lambda: _parquet_batches(path, schema)))


def _parquet_batches(path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=schema.names):
                yield batch.cast(schema)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _plain(field: pa.Field) -> pa.Field:
    """Return a field without its dictionary: an IPC file cannot have another dictionary for each batch."""
    kind = field.type
    return field.with_type(kind.value_type) if pa.types.is_dictionary(kind) else field


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read as Parquet: {error}")


class JsonLines(Sequence[Any]):
    """The objects of a JSON Lines file, parsed when asked for; empty lines are skipped."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            DataError: the file cannot be read.
        """
        self._path = path
        try:
            with Path(path).open("rb") as file:
                is_empty = not file.seek(0, 2)
                self._bytes = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{path}: cannot be read as JSON Lines in UTF-8: {error}") from error
        self._lines, self._starts, self._ends = _lines_of(self._bytes)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        where = f"{self._path}, line {int(self._lines[index]) + 1}"
        line = bytes(self._bytes[int(self._starts[index]) : int(self._ends[index])])
        try:
            return json_object(line.decode(), where)
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: cannot be read as JSON Lines in UTF-8: {error}") from error


def json_object(line: str, where: str) -> dict[str, Any]:
    """Return the object in a line.

    Raises:
        DataError: it is none.
    """
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: a line holds one JSON object, this is {type(value).__name__}")
    return value


def file_identity(path: str | Path) -> list[Any]:
    """Return what changes when a file is written again: path, bytes, and time of its last change in ns."""
    stat = Path(path).stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]


def _lines_of(content: Any) -> tuple[Any, Any, Any]:
    """Return the numbers of the lines that are not empty, from 0, and where each begins and ends."""
    found = [_line_ends(content, start) for start in range(0, len(content), _SCANNED)]
    if len(content) and content[-1:] != b"\n":
        found.append(np.array([len(content)]))
    ends = np.concatenate([np.empty(0, np.int64), *found])
    starts = np.concatenate([np.zeros(1, np.int64), ends + 1])[: len(ends)]
    is_kept = ends > starts
    # Only a line that begins with a blank can have nothing but blanks.
    whole = np.frombuffer(content, dtype=np.uint8)
    begins_blank = np.flatnonzero(is_kept)[np.isin(whole[starts[is_kept]], _BLANKS)]
    is_kept[[line for line in begins_blank if not content[starts[line] : ends[line]].strip()]] = False
    return np.flatnonzero(is_kept), starts[is_kept], ends[is_kept]


def _line_ends(content: Any, start: int) -> Any:
    block = np.frombuffer(content, dtype=np.uint8)[start : start + _SCANNED]
    return np.flatnonzero(block == ord("\n")) + start
