"""Prompts from Parquet and JSON Lines files; `rows` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from ppojob_api.v1alpha1.data import Columns
from ppojob_trainer.data.cache import NO_CACHE, TableCache
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import VERL_COLUMNS, PromptRecord, record_from_row
from ppojob_trainer.data.sources.rows import JsonLines, file_identity, json_object, parquet_rows

_READ_ALWAYS = ("data_source", "reward_model", "extra_info")


class FilePrompts:
    """A `PromptSource` over rows of several files, one after the other."""

    def __init__(self, files: Sequence[tuple[str, Sequence[Any]]], columns: Columns, *, is_shared: bool) -> None:
        """
        Args:
            files: path and rows (dictionaries) of each.
            is_shared: whether no rows are held in memory.

        Raises:
            DataError: there is no row at all.
        """
        self._files = files
        self._columns = columns
        self._is_shared = is_shared
        if len(self) == 0:
            raise DataError(f"{self.name}: no rows")

    @property
    def name(self) -> str:
        """The paths."""
        return ", ".join(path for path, _ in self._files)

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self._files)

    @property
    def is_shared(self) -> bool:
        """Whether other processes can open it without another copy in memory."""
        return self._is_shared

    def identity(self) -> dict[str, Any]:
        """Return the files and the columns."""
        return {"files": [file_identity(path) for path, _ in self._files], "columns": self._columns.to_wire()}

    def __getitem__(self, index: int) -> PromptRecord:
        row = index
        for path, rows in self._files:
            if 0 <= row < len(rows):
                return record_from_row(rows[row], self._columns, f"{path}, row {row}", Path(path).stem)
            row -= len(rows)
        raise IndexError(f"row {index} of {len(self)} in {self.name}")


def read_parquet(paths: Sequence[str], columns: Columns = VERL_COLUMNS, cache: TableCache = NO_CACHE) -> FilePrompts:
    """Open Parquet files.

    Raises:
        DataError: a file is missing or not Parquet, a column is missing; names the path.
    """
    names = {columns.prompt_column, columns.ground_truth_column, *_READ_ALWAYS}
    wanted = [name for name in names if name is not None]
    for path in paths:
        # With all of its columns, so that the message has their names.
        check_parquet(path, columns)
    files = [(path, parquet_rows(path, wanted, cache)) for path in paths]
    return FilePrompts(files, columns, is_shared=all(rows.is_mapped for _, rows in files))


def read_jsonl(paths: Sequence[str], columns: Columns = VERL_COLUMNS) -> FilePrompts:
    """Open JSON Lines files: one object a line, empty lines are skipped.

    Raises:
        DataError: a file is missing, its first line is not a JSON object, a column is missing; names path and line.
    """
    for path in paths:
        check_jsonl(path, columns)
    return FilePrompts([(path, JsonLines(path)) for path in paths], columns, is_shared=True)


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
        with Path(_existing(path)).open("rb") as file:
            line = next((line for line in file if line.strip()), b"").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as JSON Lines in UTF-8: {error}") from error
    _check_first(path, [json_object(line, f"{path}, first line")] if line else [], columns)


def _check_first(path: str, rows: Sequence[Any], columns: Columns) -> None:
    if not rows:
        raise DataError(f"{path}: no rows")
    record_from_row(rows[0], columns, f"{path}, row 0", Path(path).stem)


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise DataError(
            f"{path}: there is no such file where the trainer runs. Give the path as the container sees it, below "
            "storage.mountPath"
        )
    return path
