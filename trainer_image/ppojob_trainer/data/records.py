"""One prompt, and the check of a row with verl's columns.

verl's columns: `prompt` (chat messages or a string), `data_source`, `reward_model` (a dict with `ground_truth`),
`extra_info` (a dict). Only the prompt must be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ppojob_trainer.data.errors import DataError

Message = dict[str, Any]


@dataclass(frozen=True)
class PromptRecord:
    """A prompt as text (or chat messages with `role` and `content`), and what its reward function is told."""

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

    def __getitem__(self, index: int) -> PromptRecord:
        """Prompt `index`, from 0."""
        ...


def record_from_row(row: Mapping[str, Any], prompt_column: str, where: str, default_source: str) -> PromptRecord:
    """Turn a row with verl's columns into a record.

    Args:
        where: names the row in errors, such as `/data/train.parquet, row 7`.
        default_source: the data_source of rows that have none.

    Raises:
        DataError: a column is missing or holds something else than it should.
    """
    if prompt_column not in row:
        raise DataError(f"{where}: no column {prompt_column!r}; there are {', '.join(row)}. Set promptColumn")
    return PromptRecord(
        prompt=_prompt(row[prompt_column], f"{where}, column {prompt_column!r}"),
        data_source=str(row.get("data_source") or default_source),
        ground_truth=_ground_truth(row.get("reward_model"), where),
        extra_info=_extra_info(row.get("extra_info"), where),
    )


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
        raise DataError(f"{where}, column 'reward_model': wanted a dict with ground_truth, this is {value!r:.200}")
    return value["ground_truth"]


def _extra_info(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}, column 'extra_info': wanted a dict, this is {type(value).__name__}")
    return dict(value)
