"""Scores a rollout batch: token ids to text, text to scores, scores to the last token of each response.

Called by the reward workers, with a `Scorer` of theirs or with what a model gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ppojob_trainer.protocol import DataProto, Keys, object_array, responses_to_lists
from ppojob_trainer.rewards.interface import ScoreItem, ScoreResult
from ppojob_trainer.rewards.scorer import Scorer

# Non-tensor fields of the result: the rest of what the function returned, and the text that was scored.
REWARD_EXTRAS = "reward_extras"
RESPONSE_TEXT = "response_text"

# Beginnings of the names of a scored batch's metrics, which are lists with an entry for each row that has one.
SOURCE_PREFIX = "source/"
REWARD_PREFIX = "reward/"


class Decoder(Protocol):
    """The part of a HuggingFace tokenizer that is needed here."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return the texts of lists of token ids."""
        ...


def score_batch(batch: DataProto, scorer: Scorer, decoder: Decoder) -> DataProto:
    """Score the B responses of a rollout.

    Args:
        batch: needs responses, response_mask [B, R], and the non-tensors data_source, ground_truth, extra_info, index.

    Returns:
        token_level_scores float32 [B, R], and the non-tensors `reward_extras` (dict) and `response_text` (str), to
        be joined to the batch with `union`. An error turned into a score is the entry `error` of reward_extras.

    Raises:
        RewardError: see `Scorer.score`.
    """
    mask = batch.tensor(Keys.RESPONSE_MASK)
    texts = response_texts(batch, decoder)
    results = scorer.score(score_items(batch, texts))
    scores = torch.tensor([result.score for result in results], dtype=torch.float32)
    return DataProto.from_dict(
        {Keys.TOKEN_LEVEL_SCORES: scores_on_last_token(scores.to(mask.device), mask)},
        {REWARD_EXTRAS: object_array(map(_extras, results)), RESPONSE_TEXT: object_array(texts)},
    )


def response_texts(batch: DataProto, decoder: Decoder) -> list[str]:
    """Return the B responses as text, special tokens left out."""
    token_lists = responses_to_lists(batch.tensor(Keys.RESPONSES), batch.tensor(Keys.RESPONSE_MASK))
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


def scores_on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Put scores float32 [B] on the last unmasked token: float32 [B, R]. A row without tokens (padding) has none."""
    mask = response_mask.bool()
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
    last = places == places.amax(dim=1, keepdim=True)
    return torch.where(last & mask, scores.unsqueeze(1), 0.0)


def scores_by_source(batch: DataProto, scores: Tensor) -> dict[str, list[float]]:
    """Return the scores [B, R] of each data source, row by row, under the name `source/<data source>`.

    Rows without response tokens that stand for padding have no place here: leave them out before.
    """
    found: dict[str, list[float]] = {}
    for source, score in zip(batch.array(Keys.DATA_SOURCE), scores.sum(dim=1).tolist(), strict=True):
        found.setdefault(f"{SOURCE_PREFIX}{source}", []).append(score)
    return found


def numbers_in(extras: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the finite numbers that stand beside the scores under the name `reward/<key>`; booleans are 0 and 1."""
    found: dict[str, list[float]] = {}
    for row in extras:
        for key, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.setdefault(f"{REWARD_PREFIX}{key}", []).append(float(value))
    return found


def _extras(result: ScoreResult) -> dict[str, Any]:
    return result.extras if result.error is None else {**result.extras, "error": result.error}
