"""A rollout batch becomes token-level scores."""

from typing import Any

import pytest
import torch

from ppojob_trainer.protocol import DataProto, Keys, check_layout, rollout_batch
from ppojob_trainer.rewards import RewardFunctionError, Scorer
from ppojob_trainer.rewards.batch import numbers_in, score_batch, scores_by_source, scores_on_last_token


class Letters:
    """Token 1 is a, 2 is b ...; 0 is special."""

    def batch_decode(self, sequences, skip_special_tokens=False):
        assert skip_special_tokens
        return ["".join(chr(96 + token) for token in sequence if token) for sequence in sequences]


def rollout() -> DataProto:
    tensors = rollout_batch([[5, 6], [7], [8]], [[1, 2, 0], [3], []], pad_token_id=9)
    return DataProto.from_dict(
        tensors,
        {
            Keys.DATA_SOURCE: ["s"] * 3,
            Keys.GROUND_TRUTH: ["ab", "x", "y"],
            Keys.EXTRA_INFO: [{"bonus": 1}, {}, None],
            Keys.INDEX: [10, 11, 12],
        },
    )


def exact(*, solution_str, ground_truth, extra_info, **_):
    return {"score": float(solution_str == ground_truth) + extra_info.get("bonus", 0), "text": solution_str}


def test_scores_lie_on_the_last_token_of_each_response() -> None:
    batch = rollout()
    scored = score_batch(batch, Scorer(exact), Letters())
    assert scored.tensor(Keys.TOKEN_LEVEL_SCORES).tolist() == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]
    assert scored.array("reward_extras").tolist() == [{"text": "ab"}, {"text": "c"}, {"text": ""}]
    assert scored.array("response_text").tolist() == ["ab", "c", ""]
    check_layout(batch.union(scored))


def test_an_error_turned_into_a_score_is_kept() -> None:
    def fails(**_):
        raise ValueError("no")

    scored = score_batch(rollout(), Scorer(fails, on_error="Score", error_score=-1.0), Letters())
    assert scored.tensor(Keys.TOKEN_LEVEL_SCORES).tolist() == [[0, 0, -1], [-1, 0, 0], [0, 0, 0]]
    assert "ValueError: no for prompt 11" in scored.array("reward_extras")[1]["error"]
    with pytest.raises(RewardFunctionError, match="prompt 10"):
        score_batch(rollout(), Scorer(fails), Letters())


def test_masks_with_gaps_and_without_tokens() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert scores_on_last_token(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [
        [0, 0, 1, 0],
        [0, 0, 0, 0],
        [3, 0, 0, 0],
    ]


def test_numbers_beside_the_score_are_metrics_and_words_are_not() -> None:
    rows: list[dict[str, Any]] = [
        {"format": True, "words": 3, "text": "a"},
        {"format": False, "words": float("nan")},
        {},
    ]
    assert numbers_in(rows) == {"reward/format": [1.0, 0.0], "reward/words": [3.0]}


def test_scores_are_listed_by_data_source() -> None:
    batch = DataProto.from_dict(non_tensors={Keys.DATA_SOURCE: ["a", "b", "a"]})
    scores = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    assert scores_by_source(batch, scores) == {"source/a": [1.0, 0.0], "source/b": [2.0]}
