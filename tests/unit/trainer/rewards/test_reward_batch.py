"""A rollout batch becomes token-level scores."""

from typing import Any, cast

import torch

from ppojob_trainer.protocol import DataProto, Keys, Ragged, check_layout, rollout_batch
from ppojob_trainer.rewards import ScoreItem, Scorer, ScoreResult
from ppojob_trainer.rewards.batch import (
    counts_of,
    numbers_by_source,
    numbers_in,
    score_batch,
    scores_by_source,
    scores_on_last_token,
)


class Letters:
    """Token 1 is a, 2 is b ...; 0 is special."""

    def batch_decode(self, sequences, skip_special_tokens=False):
        assert skip_special_tokens
        return ["".join(chr(96 + token) for token in sequence if token) for sequence in sequences]


def rollout() -> DataProto:
    tensors = rollout_batch([[5, 6], [7], [8]], [[1, 2, 0], [3], []])
    return DataProto.from_dict(
        tensors,
        {
            Keys.DATA_SOURCE: ["s"] * 3,
            Keys.GROUND_TRUTH: ["ab", "x", "y"],
            Keys.EXTRA_INFO: [{"bonus": 1}, {}, None],
            Keys.INDEX: [10, 11, 12],
        },
    )


class Graded:
    """A Scorer that has these results."""

    def __init__(self, *results: ScoreResult) -> None:
        self.results = list(results)
        self.items: list[ScoreItem] = []

    def score(self, items: list[ScoreItem]) -> list[ScoreResult]:
        self.items = items
        return self.results


def scored(*results: ScoreResult) -> tuple[Any, Graded]:
    scorer = Graded(*results)
    return score_batch(rollout(), cast(Scorer, scorer), Letters()), scorer


def test_scores_lie_on_the_last_token_of_each_response() -> None:
    found, scorer = scored(ScoreResult(2.0, {"text": "ab"}), ScoreResult(0.0), ScoreResult(3.0))
    assert found.scores.to_lists() == [[0, 0, 2], [0], []]
    assert found.extras == [{"text": "ab"}, {}, {}]
    assert found.errors == ["", "", ""]
    assert scorer.items == [
        ScoreItem("s", "ab", "ab", {"bonus": 1}, 10),
        ScoreItem("s", "c", "x", {}, 11),
        ScoreItem("s", "", "y", {}, 12),
    ]
    check_layout(rollout().with_fields({Keys.TOKEN_LEVEL_SCORES: found.scores}))


def test_failures_are_kept_beside_the_scores_and_counted() -> None:
    found, _ = scored(
        ScoreResult(-1.0, error="it raised"),
        ScoreResult(0.0, error="too slow", is_timeout=True, is_dropped=True),
        ScoreResult(1.0),
    )
    assert found.scores.to_lists() == [[0, 0, -1], [0], []]
    assert found.errors == ["it raised", "too slow", ""]
    assert found.kept.tolist() == [True, False, True]
    assert counts_of(found.results) == {"count/errors": [1.0], "count/timeouts": [1.0], "count/dropped": [1.0]}


def test_masks_with_gaps_and_without_tokens() -> None:
    mask = Ragged.from_rows([[True, False, True, False], [False, False], [], [True]], torch.bool)
    assert scores_on_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask).to_lists() == [[0, 0, 1, 0], [0, 0], [], [4]]


def test_numbers_beside_the_score_are_metrics_and_words_are_not() -> None:
    rows: list[dict[str, Any]] = [
        {"format": True, "words": 3, "text": "a"},
        {"format": False, "words": float("nan")},
        {},
    ]
    assert numbers_in(rows) == {"reward/format": [1.0, 0.0], "reward/words": [3.0]}


def test_scores_are_listed_by_data_source() -> None:
    batch = DataProto.from_dict(non_tensors={Keys.DATA_SOURCE: ["a", "b", "a"]})
    scores = Ragged.from_rows([[0.0, 1.0], [2.0], []], torch.float32)
    assert scores_by_source(batch, scores) == {"source/a": [1.0, 0.0], "source/b": [2.0]}


def test_numbers_beside_the_score_are_listed_by_the_source_of_a_mixture() -> None:
    rows: list[dict[str, Any]] = [{"right": True}, {"right": False, "text": "a"}, {"right": True, "words": 3}]

    mixed = DataProto.from_dict(non_tensors={Keys.SOURCE: ["sums", "gcd", "sums"]})
    assert numbers_by_source(mixed, rows) == {
        "mixture/sums/reward/right": [1.0, 1.0],
        "mixture/sums/reward/words": [3.0],
        "mixture/gcd/reward/right": [0.0],
    }
    alone = DataProto.from_dict(non_tensors={Keys.SOURCE: [""] * 3})
    assert numbers_by_source(alone, rows) == {}
