"""Prompts from a data set in a folder that `datasets.load_dataset` reads."""

from __future__ import annotations

from typing import Any

import datasets  # type: ignore[import-untyped]

from ppojob_api.v1alpha1.data import Columns
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import VERL_COLUMNS, PromptRecord, names_of_sources, record_from_row


class HuggingFacePrompts:
    """A `PromptSource` over one split."""

    def __init__(self, rows: Any, name: str, columns: Columns) -> None:
        """
        Raises:
            DataError: no rows, or no such column.
        """
        self._rows = rows
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

    def data_sources(self) -> set[str]:
        """Return the names in the column data_source; without it, that of the data set."""
        has_column = "data_source" in self._rows.column_names
        values = self._rows.unique("data_source") if has_column else None
        return names_of_sources(values, self._columns, self._name)

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
    return HuggingFacePrompts(rows, title, columns)


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


def _title(path: str, name: str, split: str) -> str:
    return f"{path}{f' ({name})' if name else ''}, split {split}"
