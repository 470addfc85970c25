"""Prompts from Parquet and JSON Lines files.

Parquet is read with pyarrow and stays in Arrow's memory; JSON Lines become dictionaries. Neither writes a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from ppojob_api.v1alpha1.data import Columns
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import VERL_COLUMNS, PromptRecord, names_of_sources, record_from_row


class FilePrompts:
    """A `PromptSource` over rows of several files, one after the other."""

    def __init__(self, files: Sequence[tuple[str, Sequence[Any]]], columns: Columns) -> None:
        """
        Args:
            files: path and rows (dictionaries) of each.

        Raises:
            DataError: there is no row at all.
        """
        self._files = files
        self._columns = columns
        if len(self) == 0:
            raise DataError(f"{self.name}: no rows")
        # A wrong column should fail the job at its start, not in the middle of its first batch.
        self[0]

    @property
    def name(self) -> str:
        """The paths."""
        return ", ".join(path for path, _ in self._files)

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self._files)

    def data_sources(self) -> set[str]:
        """Return the names in the column data_source; of rows without it, the name of their file."""
        found: set[str] = set()
        for path, rows in self._files:
            found |= names_of_sources(_names(rows), self._columns, Path(path).stem)
        return found

    def __getitem__(self, index: int) -> PromptRecord:
        row = index
        for path, rows in self._files:
            if 0 <= row < len(rows):
                return record_from_row(rows[row], self._columns, f"{path}, row {row}", Path(path).stem)
            row -= len(rows)
        raise IndexError(f"row {index} of {len(self)} in {self.name}")


class _ArrowRows(Sequence[Any]):
    """Rows of an Arrow table as dictionaries, made when asked for."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def distinct(self, column: str) -> list[Any] | None:
        """Return the values of a column, each once; None where there is no such column."""
        return self._table.column(column).unique().to_pylist() if column in self._table.column_names else None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def read_parquet(paths: Sequence[str], columns: Columns = VERL_COLUMNS) -> FilePrompts:
    """Open Parquet files.

    Raises:
        DataError: a file is missing or not Parquet, a column is missing; names the path.
    """
    return FilePrompts([(path, _parquet_rows(path)) for path in map(str, paths)], columns)


def read_jsonl(paths: Sequence[str], columns: Columns = VERL_COLUMNS) -> FilePrompts:
    """Open JSON Lines files: one object a line, empty lines are skipped.

    Raises:
        DataError: a file is missing, a line is not a JSON object, a column is missing; names path and line.
    """
    return FilePrompts([(path, _jsonl_rows(path)) for path in map(str, paths)], columns)


def check_parquet(path: str, columns: Columns) -> None:
    """Read the first row of a Parquet file.

    Raises:
        DataError: it cannot be read, has no row, or a column is missing.
    """
    try:
        with pq.ParquetFile(_existing(path)) as file:
            rows: list[Any] = next((batch.to_pylist() for batch in file.iter_batches(batch_size=1)), [])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    _check_first(path, rows, columns)


def check_jsonl(path: str, columns: Columns) -> None:
    """Read the first row of a JSON Lines file.

    Raises:
        DataError: it cannot be read, has no row, or a column is missing.
    """
    try:
        with Path(_existing(path)).open(encoding="utf-8") as file:
            line = next((line for line in file if line.strip()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as JSON Lines in UTF-8: {error}") from error
    _check_first(path, [_json_object(line, f"{path}, first line")] if line else [], columns)


def _check_first(path: str, rows: Sequence[Any], columns: Columns) -> None:
    if not rows:
        raise DataError(f"{path}: no rows")
    record_from_row(rows[0], columns, f"{path}, row 0", Path(path).stem)


def _names(rows: Sequence[Any]) -> Iterable[Any] | None:
    return rows.distinct("data_source") if isinstance(rows, _ArrowRows) else {row.get("data_source") for row in rows}


def _parquet_rows(path: str) -> _ArrowRows:
    try:
        return _ArrowRows(pq.read_table(_existing(path), memory_map=True))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def _jsonl_rows(path: str) -> list[dict[str, Any]]:
    try:
        lines = Path(_existing(path)).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as JSON Lines in UTF-8: {error}") from error
    return [_json_object(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: a line holds one JSON object, this is {type(value).__name__}")
    return value


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise DataError(
            f"{path}: there is no such file where the trainer runs. Give the path as the container sees it, below "
            "storage.mountPath"
        )
    return path
