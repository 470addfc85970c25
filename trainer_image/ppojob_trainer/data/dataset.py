"""Batches of prompts in an order that a restart continues.

`PromptDataset` turns prompt numbers into `DataProto` batches; `PromptLoader` decides which numbers come next. Called
by the data actor. A batch holds no tensors: prompts are lists of token ids until the rollout has their responses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import PromptSource
from ppojob_trainer.data.tokenize import Overlong, PromptTokenizer, truncate
from ppojob_trainer.data.tokens import TokenizedPrompts
from ppojob_trainer.protocol import DataProto, Keys, Meta, Ragged, object_array

logger = logging.getLogger(__name__)


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

    def batch(self, numbers: Sequence[int], epoch: int = 0) -> DataProto:
        """Return these prompts (numbers from 0 to len - 1) as a batch.

        Columns: prompt_ids (tokens), raw_prompt (messages), data_source, ground_truth, extra_info, index (row of
        the source), uid ("<epoch>-<index>", the same after a restart). meta_info: epoch.

        Raises:
            DataError: a prompt cannot be used; names it.
        """
        indices = [int(self._kept[number]) for number in numbers]
        records = [self._source[index] for index in indices]
        messages = [
            self._tokenizer.messages(record, self._where(index)) for index, record in zip(indices, records, strict=True)
        ]
        return DataProto.from_dict(
            {Keys.PROMPT_IDS: Ragged.from_rows(list(map(self._token_ids, indices)), torch.int32)},
            {
                Keys.RAW_PROMPT: object_array(messages),
                Keys.DATA_SOURCE: [record.data_source for record in records],
                Keys.GROUND_TRUTH: object_array(record.ground_truth for record in records),
                Keys.EXTRA_INFO: object_array(record.extra_info for record in records),
                Keys.INDEX: indices,
                Keys.UID: [f"{epoch}-{index}" for index in indices],
            },
            meta_info={Meta.EPOCH: epoch},
        )

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


class PromptLoader:
    """Endless batches of equal size; its position fits into a checkpoint.

    Each epoch has a different order, which depends only on seed and epoch. The prompts that do not fill the last batch
    of an epoch are left out of that epoch.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        """
        Args:
            batch_size: prompts in a batch.

        Raises:
            DataError: the data set has fewer prompts than a batch.
        """
        if len(dataset) < batch_size:
            raise DataError(
                f"{dataset.name}: {len(dataset)} prompts cannot fill a batch of data.trainBatchSize {batch_size}"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the prompts of an incomplete one are not counted."""
        return len(self._dataset) // self._batch_size

    def next_batch(self, count: int | None = None) -> DataProto:
        """Return the next batch, see `PromptDataset.batch`.

        Args:
            count: prompts to return, or those that are left of the epoch if they are fewer. None: a whole batch.
        """
        epoch, position = self._next_place(self._batch_size if count is None else 1)
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
        numbers = self._order[position : position + (count or self._batch_size)].tolist()
        batch = self._dataset.batch(numbers, epoch)
        # Only now: a batch that failed is not counted as seen.
        self._epoch, self._position = epoch, position + len(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Position for the checkpoint; counted in prompts, so that it holds for another batch size, too."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self._dataset),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint.

        Raises:
            DataError: it is of other data, another seed or another order: going on would repeat or skip prompts.
        """
        mine = self.state_dict()
        for key in ("num_prompts", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise DataError(
                    f"{self._dataset.name}: the checkpoint's data has {key} = {state[key]}, now it is {mine[key]}. "
                    "Resume with the same data, or start a new run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _next_place(self, least: int) -> tuple[int, int]:
        """Return epoch and position of the next prompts: in the next epoch, if fewer than `least` are left."""
        if self._position + least > len(self._dataset):
            return self._epoch + 1, 0
        return self._epoch, self._position

    def _order_of(self, epoch: int) -> np.ndarray[Any, Any]:
        if not self._shuffle:
            return np.arange(len(self._dataset))
        # NumPy promises that RandomState's streams never change, so a checkpoint outlives an upgrade.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self._dataset))
