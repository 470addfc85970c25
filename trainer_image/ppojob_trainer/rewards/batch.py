"""Scores a rollout batch: token ids to text, text to scores, scores to the last token of each response.

Called by the reward workers, with their `Scorer` or with a model's scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ppojob_trainer.protocol import DataProto, Keys, Ragged, responses_to_lists
from ppojob_trainer.rewards.interface import Extra, ScoreItem, ScoreResult
from ppojob_trainer.rewards.scoring import Scorer

# First parts of the names of a scored batch's metrics. Those of data sources, extras and mixtures are lists with an
# entry for each row that has one; those of counts are lists whose sum is the count.
SOURCE_PREFIX = "source/"
REWARD_PREFIX = "reward/"
MIXTURE_PREFIX = "mixture/"
COUNT_PREFIX = "count/"


class Decoder(Protocol):
    """The part of a HuggingFace tokenizer that is needed here."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return the texts of lists of token ids."""
        ...


@dataclass(frozen=True)
class Scored:
    """The scores of B responses.

    scores: float32, on the last token of each response. results: B results of the function, in the same order.
    """

    scores: Ragged
    results: Sequence[ScoreResult]

    @property
    def extras(self) -> list[dict[str, Extra]]:
        """What the function returned beside each score."""
        return [result.extras for result in self.results]

    @property
    def errors(self) -> list[str]:
        """Why the function gave no score; empty where it did."""
        return [result.error or "" for result in self.results]

    @property
    def kept(self) -> Tensor:
        """Bool [B]: False for responses that are dropped."""
        return torch.tensor([not result.is_dropped for result in self.results], dtype=torch.bool)


def score_batch(batch: DataProto, scorer: Scorer, decoder: Decoder) -> Scored:
    """Score the B responses of a rollout.

    Args:
        batch: needs input_ids, response_mask, data_source, ground_truth, extra_info, index.

    Raises:
        RewardError: see `Scorer.score`.
    """
    results = scorer.score(score_items(batch, response_texts(batch, decoder)))
    scores = torch.tensor([result.score for result in results], dtype=torch.float32)
    return Scored(scores_on_last_token(scores, batch.ragged(Keys.RESPONSE_MASK)), results)


def response_texts(batch: DataProto, decoder: Decoder) -> list[str]:
    """Return the B responses as text, special tokens left out."""
    token_lists = responses_to_lists(batch.responses(), batch.ragged(Keys.RESPONSE_MASK))
    return decoder.batch_decode(token_lists, skip_special_tokens=True)


def score_items(batch: DataProto, texts: Sequence[str]) -> list[ScoreItem]:
    """Return what the reward function is called with, one item for each row of the batch."""
    return [
        ScoreItem(str(data_source), text, ground_truth, dict(extra_info or {}), index)
        for data_source, text, ground_truth, extra_info, index in zip(
            batch.array(Keys.DATA_SOURCE),
            texts,
            batch.array(Keys.GROUND_TRUTH),
            batch.array(Keys.EXTRA_INFO),
            batch.array(Keys.INDEX),
            strict=True,
        )
    ]


def scores_on_last_token(scores: Tensor, response_mask: Ragged) -> Ragged:
    """Put scores float32 [B] on the last unmasked token of each response. A row without such tokens has none."""
    chosen = response_mask.values.nonzero().flatten()
    rows = response_mask.row_of[chosen]
    is_last = torch.ones(len(rows), dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    values = torch.zeros(len(response_mask.values), dtype=torch.float32)
    values[chosen[is_last]] = scores[rows[is_last]]
    return response_mask.with_values(values)


def scores_by_source(batch: DataProto, scores: Ragged) -> dict[str, list[float]]:
    """Return the scores of each data source, row by row, under the name `source/<data source>`.

    Pass neither copies that stand for padding nor dropped rows.
    """
    found: dict[str, list[float]] = {}
    for source, score in zip(batch.array(Keys.DATA_SOURCE), scores.sums().tolist(), strict=True):
        found.setdefault(f"{SOURCE_PREFIX}{source}", []).append(score)
    return found


def numbers_in(extras: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the finite numbers beside the scores under the name `reward/<key>`; booleans are 0 and 1."""
    found: dict[str, list[float]] = {}
    for row in extras:
        for key, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.setdefault(f"{REWARD_PREFIX}{key}", []).append(float(value))
    return found


def numbers_by_source(batch: DataProto, extras: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return `numbers_in` the rows of each source of a mixture, under the name `mixture/<source>/reward/<key>`."""
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for source, row in zip(batch.array(Keys.SOURCE), extras, strict=True):
        if source:
            rows_of.setdefault(source, []).append(row)
    return {
        f"{MIXTURE_PREFIX}{source}/{name}": values
        for source, rows in rows_of.items()
        for name, values in numbers_in(rows).items()
    }


def counts_of(results: Iterable[ScoreResult]) -> dict[str, list[float]]:
    """Return how many responses have no score: `count/errors`, `count/timeouts` (no errors), `count/dropped`."""
    failed = [result for result in results if result.error is not None]
    timeouts = sum(result.is_timeout for result in failed)
    counts = {
        "errors": len(failed) - timeouts,
        "timeouts": timeouts,
        "dropped": sum(result.is_dropped for result in failed),
    }
    return {f"{COUNT_PREFIX}{name}": [float(count)] for name, count in counts.items()}
