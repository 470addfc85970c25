"""Scores a rollout batch: token ids to text, text to scores, scores to the last token of each response.

Called by the reward workers, with a `Scorer` of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ppojob_trainer.protocol import DataProto, Keys, object_array, responses_to_lists
from ppojob_trainer.rewards.interface import ScoreItem, ScoreResult
from ppojob_trainer.rewards.scorer import Scorer

# Non-tensor fields of the result: the rest of what the function returned, and the text that was scored.
REWARD_EXTRAS = "reward_extras"
RESPONSE_TEXT = "response_text"


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
    token_lists = responses_to_lists(batch.tensor(Keys.RESPONSES), mask)
    texts = decoder.batch_decode(token_lists, skip_special_tokens=True)
    results = scorer.score(score_items(batch, texts))
    scores = torch.tensor([result.score for result in results], dtype=torch.float32)
    return DataProto.from_dict(
        {Keys.TOKEN_LEVEL_SCORES: scores_on_last_token(scores.to(mask.device), mask)},
        {REWARD_EXTRAS: object_array(map(_extras, results)), RESPONSE_TEXT: object_array(texts)},
    )


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


def _extras(result: ScoreResult) -> dict[str, Any]:
    return result.extras if result.error is None else {**result.extras, "error": result.error}
