"""The prompts of a source by number, as token ids, and rows of them as a batch.

`loader` decides which numbers come next. Called by it and by the data actor. A batch has no padding: prompts are token
ids of different lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import Message, PromptRecord, PromptSource
from ppojob_trainer.data.tokenize import Overlong, PromptTokenizer, truncate
from ppojob_trainer.data.tokens import TokenizedPrompts
from ppojob_trainer.protocol import DataProto, Keys, Meta, Ragged, object_array

logger = logging.getLogger(__name__)

MIXTURE_SOURCE = "mixture_source"
"""Key of a mixture's source in the `extra_info` that a reward function gets."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt of a batch.

    index: its row in the source. epoch: the pass over the source. source: name of the source in a mixture, else empty.
    """

    token_ids: list[int]
    messages: list[Message]
    record: PromptRecord
    index: int
    epoch: int
    source: str

    @property
    def uid(self) -> str:
        """Name of this occurrence, the same after a restart: <epoch>-<index>, in a mixture <source>-<epoch>-<index>."""
        return "-".join([*filter(None, [self.source]), str(self.epoch), str(self.index)])

    @property
    def extra_info(self) -> dict[str, Any]:
        """What the reward function gets: in a mixture, the name of the source too."""
        return self.record.extra_info | ({MIXTURE_SOURCE: self.source} if self.source else {})


def batch_of(rows: Sequence[PromptRow], epoch: int = 0) -> DataProto:
    """Return rows as a batch.

    Columns: prompt_ids (tokens), raw_prompt (messages), source, data_source, ground_truth, extra_info, index, uid.
    meta_info: epoch.
    """
    return DataProto.from_dict(
        {Keys.PROMPT_IDS: Ragged.from_rows([row.token_ids for row in rows], torch.int32)},
        {
            Keys.RAW_PROMPT: object_array(row.messages for row in rows),
            Keys.SOURCE: [row.source for row in rows],
            Keys.DATA_SOURCE: [row.record.data_source for row in rows],
            Keys.GROUND_TRUTH: object_array(row.record.ground_truth for row in rows),
            Keys.EXTRA_INFO: object_array(row.extra_info for row in rows),
            Keys.INDEX: [row.index for row in rows],
            Keys.UID: [row.uid for row in rows],
        },
        meta_info={Meta.EPOCH: epoch},
    )


class PromptDataset:
    """The prompts of a source as token ids, at most `max_length` long."""

    def __init__(
        self,
        source: PromptSource,
        tokenizer: PromptTokenizer,
        tokenized: TokenizedPrompts,
        max_length: int,
        overlong: Overlong = "Fail",
    ) -> None:
        """
        Args:
            tokenizer: the one that made `tokenized`, with the token ids of all prompts.
            max_length: longest prompt in tokens, chat template included.
            overlong: Fail raises; Filter leaves prompts out; Truncate keeps the last tokens.

        Raises:
            DataError: a prompt has no tokens; with Fail, a prompt is too long; with Filter, none is left.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._tokenized = tokenized
        self._max_length = max_length
        self._is_truncated = overlong == "Truncate"
        self._kept: np.ndarray[Any, Any] | range = range(len(source))
        if overlong == "Filter":
            self._kept = self._short_enough()
        else:
            self._check_lengths()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def name(self) -> str:
        """The source's name, for messages."""
        return self._source.name

    def data_sources(self) -> set[str]:
        """Return the names of the data sets that the prompts are of."""
        return self._tokenized.data_sources()

    def row(self, number: int, epoch: int = 0, source: str = "") -> PromptRow:
        """Return a prompt.

        Args:
            number: from 0 to len - 1.
            epoch: the pass over this data set.
            source: its name in a mixture.

        Raises:
            DataError: the prompt cannot be used; names it.
        """
        index = int(self._kept[number])
        record = self._source[index]
        messages = self._tokenizer.messages(record, self._where(index))
        return PromptRow(self._token_ids(index), messages, record, index, epoch, source)

    def batch(self, numbers: Sequence[int], epoch: int = 0) -> DataProto:
        """Return these prompts as a batch, see `row` and `batch_of`."""
        return batch_of([self.row(number, epoch) for number in numbers], epoch)

    def batches(self, size: int) -> Iterator[DataProto]:
        """Yield all prompts once, in their order; the last batch may be smaller. For validation."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def _where(self, index: int) -> str:
        return f"{self._source.name}, prompt {index}"

    def _token_ids(self, index: int) -> list[int]:
        return truncate(self._tokenized.token_ids(index), self._max_length)

    def _check_lengths(self) -> None:
        lengths = self._tokenized.lengths
        if not lengths.all():
            raise DataError(f"{self._where(int(lengths.argmin()))}: the prompt has no tokens")
        overlong = np.flatnonzero(lengths > self._max_length)
        if not len(overlong):
            return
        first, longest = int(overlong[0]), self._max_length
        if not self._is_truncated:
            raise DataError(
                f"{self._where(first)}: {lengths[first]} tokens, more than data.maxPromptLength {longest}; "
                f"{len(overlong)} of {len(lengths)} prompts are longer. "
                f"Raise it (the longest prompt has {lengths.max()} tokens), or set data.overlongPrompts to Filter or "
                "Truncate"
            )
        text = "%s: %d of %d prompts are longer than data.maxPromptLength %d: they are truncated on the left"
        logger.warning(text, self.name, len(overlong), len(lengths), longest)

    def _short_enough(self) -> np.ndarray[Any, Any]:
        lengths = self._tokenized.lengths
        kept = np.flatnonzero((lengths > 0) & (lengths <= self._max_length))
        if not len(kept):
            raise DataError(
                f"{self._source.name}: all {len(lengths)} prompts are longer than data.maxPromptLength "
                f"{self._max_length}: raise it; the longest prompt has {lengths.max()} tokens"
            )
        if len(kept) < len(lengths):
            left_out = len(lengths) - len(kept)
            logger.warning("%s: %d of %d prompts are too long and left out", self.name, left_out, len(lengths))
        return kept
