"""Batches of prompts of one or several sources, in an order that a restart continues.

    mixture         a b a a b a a b a a  b a a b ...      by weight: `apportionment`
    source a        2   9 8   3 6   7 1    4 0 | 5 ...    its own shuffled order, again and again

Called by the data actor. One source is a mixture of one. The order depends on seed, sizes and weights; it does not
depend on the layout, on processes, or on retries.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppojob_trainer.data.apportionment import Apportionment
from ppojob_trainer.data.dataset import PromptDataset, PromptRow, batch_of
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.protocol import DataProto

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightedDataset:
    """A source of a mixture. name: empty if it is the only one. weight: relative to those of the others."""

    dataset: PromptDataset
    name: str = ""
    weight: float = 1.0


class PromptLoader:
    """Endless batches of equal size; its position fits into a checkpoint.

    An epoch has as many prompts as all sources together. Those that do not fill the last batch of an epoch are left
    out. With one source, an epoch is a pass over its prompts. With several, each source is shuffled and repeated by
    itself, so it may be passed more or less than once in an epoch.
    """

    def __init__(
        self, sources: Sequence[WeightedDataset], batch_size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        """
        Args:
            batch_size: prompts in a batch.

        Raises:
            DataError: the sources have fewer prompts than a batch.
        """
        self._sources = tuple(sources)
        self._epoch_size = sum(len(source.dataset) for source in sources)
        if self._epoch_size < batch_size:
            names = ", ".join(source.dataset.name for source in sources)
            raise DataError(
                f"{names}: {self._epoch_size} prompts cannot fill a batch of data.trainBatchSize {batch_size}"
            )
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._orders = [_Order(source, seed, shuffle) for source in sources]
        self._apportionment = Apportionment([source.weight for source in sources])
        # Prompts of each source, with those that were left out at the end of an epoch.
        self._drawn = [0] * len(sources)
        self._warn_of_repetitions()

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the prompts of an incomplete one are not counted."""
        return self._epoch_size // self._batch_size

    def next_batch(self, count: int | None = None) -> DataProto:
        """Return the next batch, see `batch_of`; its epoch is that of the whole mixture.

        Args:
            count: prompts to return, or those that are left of the epoch if they are fewer. None: a whole batch.
        """
        drawn = list(self._drawn)
        left = self._left(drawn)
        if count is None and left < self._batch_size:
            for _ in range(left):
                self._draw(drawn)
            left = self._epoch_size
        epoch = sum(drawn) // self._epoch_size
        places = [self._draw(drawn) for _ in range(min(count or self._batch_size, left))]
        batch = batch_of([self._orders[source].row(place) for source, place in places], epoch)
        # Only now: a batch that failed is not counted as seen.
        self._drawn = drawn
        return batch

    def skip(self, count: int) -> None:
        """Go on as if `count` prompts had been returned by `next_batch(count)`, which leaves none out."""
        for _ in range(count):
            self._draw(self._drawn)

    def state_dict(self) -> dict[str, Any]:
        """Position for the checkpoint; counted in prompts, so that it holds for another batch size, too."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": [
                {"name": source.name, "weight": source.weight, "num_prompts": len(source.dataset), "drawn": drawn}
                for source, drawn in zip(self._sources, self._drawn, strict=True)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint.

        Raises:
            DataError: it is of other data, another seed or another order: resuming would repeat or skip prompts.
        """
        for what, saved, now in _compared(state, self.state_dict()):
            if saved != now:
                names = ", ".join(source.dataset.name for source in self._sources)
                raise DataError(
                    f"{names}: the checkpoint's data has {what} = {saved}, now it is {now}. "
                    "Resume with the same data, or start a new run"
                )
        self._drawn = [int(source["drawn"]) for source in state["sources"]]

    def _draw(self, drawn: list[int]) -> tuple[int, int]:
        """Return the source of the next prompt and the prompt's place in it, and count it."""
        source = self._apportionment.next_source(drawn)
        drawn[source] += 1
        return source, drawn[source] - 1

    def _left(self, drawn: Sequence[int]) -> int:
        """Return how many prompts are left of the epoch of the next prompt."""
        return self._epoch_size - sum(drawn) % self._epoch_size

    def _warn_of_repetitions(self) -> None:
        total = sum(source.weight for source in self._sources)
        for source in self._sources:
            of_batch = self._batch_size * source.weight / total
            if of_batch > len(source.dataset):
                text = "source %s of the mixture has %d prompts, and a batch needs about %.0f: it repeats some of them"
                logger.warning(text, source.name, len(source.dataset), of_batch)


class _Order:
    """The prompts of a source, pass after pass. Each pass has its own order, which depends only on the source's name,
    seed and pass."""

    def __init__(self, source: WeightedDataset, seed: int, shuffle: bool) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._numbers: np.ndarray[Any, Any] = np.arange(0)

    def row(self, place: int) -> PromptRow:
        """Return the prompt at a place, counted from the first pass on."""
        dataset = self._source.dataset
        epoch, position = divmod(place, len(dataset))
        if epoch != self._epoch:
            self._epoch, self._numbers = epoch, self._order_of(epoch)
        return dataset.row(int(self._numbers[position]), epoch, self._source.name)

    def _order_of(self, epoch: int) -> np.ndarray[Any, Any]:
        count = len(self._source.dataset)
        if not self._shuffle:
            return np.arange(count)
        # NumPy promises that RandomState's streams never change, so a checkpoint outlives an upgrade.
        return np.random.RandomState([self._seed, epoch, *self._source.name.encode()]).permutation(count)


def _compared(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return what must be equal in two positions, each with its name."""
    of_sources = ("name", "weight", "num_prompts")
    return [
        *((f"{name} of the sources", _of_sources(saved, name), _of_sources(now, name)) for name in of_sources),
        *((name, saved.get(name), now[name]) for name in ("seed", "shuffle")),
    ]


def _of_sources(state: dict[str, Any], name: str) -> list[Any]:
    return [source[name] for source in state.get("sources", ())]
