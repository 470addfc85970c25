"""Prompts from a data set in a folder that `datasets.load_dataset` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]

from ppojob_api.v1alpha1.data import Columns
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import VERL_COLUMNS, PromptRecord, record_from_row
from ppojob_trainer.data.sources.rows import file_identity


class HuggingFacePrompts:
    """A `PromptSource` over one split."""

    def __init__(self, rows: Any, path: str, name: str, columns: Columns) -> None:
        """
        Args:
            path: the folder. name: of the split, for messages.

        Raises:
            DataError: no rows, or no such column.
        """
        self._rows = rows
        self._path = path
        self._name = name
        self._columns = columns
        if len(rows) == 0:
            raise DataError(f"{name}: no rows")
        self[0]

    @property
    def name(self) -> str:
        """Path, configuration and split."""
        return self._name

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_shared(self) -> bool:
        """Always: `datasets` maps the rows from its own cache."""
        return True

    def identity(self) -> dict[str, Any]:
        """Return the files of the data set, its split, and the columns."""
        # Not `datasets`' own fingerprint: it depends on when its cache was written.
        files = [file_identity(path) for path in _files(Path(self._path))]
        return {"files": files, "name": self._name, "columns": self._columns.to_wire()}

    def __getitem__(self, index: int) -> PromptRecord:
        return record_from_row(self._rows[index], self._columns, f"{self._name}, row {index}", self._name)


def load_hugging_face(
    path: str, name: str = "", split: str = "train", columns: Columns = VERL_COLUMNS
) -> HuggingFacePrompts:
    """Load one split of a data set.

    Args:
        path: its folder. `HF_HOME` says where the cache is.
        name: configuration; empty: the default.

    Raises:
        DataError: the data set, configuration or split is not there or cannot be read.
    """
    title = _title(path, name, split)
    try:
        rows = datasets.load_dataset(path, name or None, split=split)
    except Exception as error:  # reading files and foreign formats raises many types
        raise DataError(f"{title}: datasets.load_dataset failed with {type(error).__name__}: {error}") from error
    return HuggingFacePrompts(rows, path, title, columns)


def check_hugging_face(path: str, name: str, split: str, columns: Columns) -> None:
    """Read the first row of a split, without converting the others.

    Raises:
        DataError: it cannot be read, has no row, or a column is missing.
    """
    title = _title(path, name, split)
    try:
        rows = datasets.load_dataset(path, name or None, split=split, streaming=True)
        row = next(iter(rows), None)
    except Exception as error:  # reading files and foreign formats raises many types
        raise DataError(f"{title}: datasets.load_dataset failed with {type(error).__name__}: {error}") from error
    if row is None:
        raise DataError(f"{title}: no rows")
    record_from_row(row, columns, f"{title}, row 0", title)


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder but for hidden ones, such as the fetch's marker."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _title(path: str, name: str, split: str) -> str:
    return f"{path}{f' ({name})' if name else ''}, split {split}"
