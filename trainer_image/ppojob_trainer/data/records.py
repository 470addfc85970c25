"""One prompt, and the check of a row.

The defaults are verl's columns: `prompt` (chat messages or a string), `data_source`, `reward_model` (a dict with
`ground_truth`), `extra_info` (a dict). Only the prompt must be there, and every column that the PPOJob names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ppojob_api.v1alpha1.data import Columns
from ppojob_trainer.data.errors import DataError

Message = dict[str, Any]

VERL_COLUMNS = Columns()
"""The columns that are read by default."""


@dataclass(frozen=True)
class PromptRecord:
    """A prompt as text (or chat messages with `role` and `content`), and what its reward function gets."""

    prompt: str | list[Message]
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """Prompts by number. The same number gives the same prompt in every process."""

    @property
    def name(self) -> str:
        """What error messages call it: a path, a task, a data set."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other processes can open it without another copy in memory."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return, as JSON, everything that its prompts depend on: a cache of them is valid as long as it is equal."""
        ...

    def __getitem__(self, index: int) -> PromptRecord:
        """Prompt `index`, from 0."""
        ...


def record_from_row(row: Mapping[str, Any], columns: Columns, where: str, default_source: str) -> PromptRecord:
    """Turn a row into a record.

    Args:
        columns: which of its columns are read.
        where: names the row in errors, such as `/data/train.parquet, row 7`.
        default_source: the data_source of rows that have none.

    Raises:
        DataError: a column is missing or holds something else than it should.
    """
    prompt = _column(row, columns.prompt_column, "promptColumn", where)
    own_truth = columns.ground_truth_column
    return PromptRecord(
        prompt=_prompt(prompt, f"{where}, column {columns.prompt_column!r}"),
        data_source=columns.data_source or str(row.get("data_source") or default_source),
        ground_truth=(
            _column(row, own_truth, "groundTruthColumn", where)
            if own_truth is not None
            else _ground_truth(row.get("reward_model"), where)
        ),
        extra_info=_extra_info(row.get("extra_info"), where),
    )


def _column(row: Mapping[str, Any], name: str, field_name: str, where: str) -> Any:
    if name not in row:
        raise DataError(f"{where}: no column {name!r}; there are {', '.join(row)}. Set {field_name}")
    return row[name]


def _prompt(value: Any, where: str) -> str | list[Message]:
    if isinstance(value, str):
        if not value:
            raise DataError(f"{where}: the prompt is empty")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: a prompt is a string or a list of messages, this is {type(value).__name__}")
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: a message is a dict with role and content, this is {message!r:.200}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"{where}: the content of a message must be text, this is {message.get('content')!r:.200}")
        # Parquet fills the fields that a message does not have with null, which chat templates take for values.
        messages.append({key: entry for key, entry in message.items() if entry is not None})
    return messages


def _ground_truth(value: Any, where: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, Mapping) or "ground_truth" not in value:
        raise DataError(
            f"{where}, column 'reward_model': expected a dict with ground_truth, got {value!r:.200}. "
            "If the ground truth has its own column, set groundTruthColumn"
        )
    return value["ground_truth"]


def _extra_info(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}, column 'extra_info': expected a dict, got {type(value).__name__}")
    return dict(value)
