"""The layout of a rollout: the worked example of the docstring, and what is refused."""

import numpy as np
import pytest
import torch

from ppojob_trainer.protocol import (
    FIELDS,
    ROLLOUT_COLUMNS,
    DataProto,
    Keys,
    ProtocolError,
    Ragged,
    check_layout,
    responses_to_lists,
    rollout_batch,
)


def test_the_worked_example() -> None:
    # Two layers with one expert of a token each.
    experts = [np.arange(8, dtype=np.uint8).reshape(4, 2, 1), np.array([[[9], [255]]], dtype=np.uint8)]
    columns = rollout_batch(
        [[5, 6, 7], [8]],
        [[1, 2], [3]],
        log_probs=[[-0.5, -1.0], [-2.0]],
        versions=[[4, 5], [5]],
        experts=experts,
    )
    assert {key: column.to_lists() for key, column in columns.items()} == {
        "input_ids": [[5, 6, 7, 1, 2], [8, 3]],
        "response_mask": [[True, True], [True]],
        "rollout_log_probs": [[-0.5, -1.0], [-2.0]],
        "rollout_versions": [[4, 5], [5]],
        "routed_experts": [[0, 1, 2, 3, 4, 5, 6, 7], [9, 255]],
    }
    assert tuple(columns) == ROLLOUT_COLUMNS
    check_layout(DataProto.from_dict(columns))


def test_versions_must_be_those_of_the_tokens() -> None:
    with pytest.raises(ProtocolError, match="response 0 has 2 tokens but 1 versions"):
        rollout_batch([[1]], [[1, 2]], versions=[[4]])


def test_experts_have_the_smallest_dtype_that_has_room_for_them() -> None:
    few, many = (np.full((2, 1, 2), 255, dtype=dtype) for dtype in (np.uint8, np.uint16))
    assert rollout_batch([[1]], [[1, 2]], experts=[few])["routed_experts"].dtype == torch.uint8
    columns = rollout_batch([[1]], [[1, 2]], experts=[many + 45])
    assert columns["routed_experts"].dtype == torch.int16
    assert columns["routed_experts"].to_lists() == [[300] * 4]
    check_layout(DataProto.from_dict(columns))


def test_experts_must_be_those_of_all_tokens_but_the_last() -> None:
    with pytest.raises(ProtocolError, match="sequence 0 has 3 tokens but experts of 3: all but the last have some"):
        rollout_batch([[1]], [[1, 2]], experts=[np.zeros((3, 1, 1), dtype=np.uint8)])


def test_an_empty_response_has_no_entries() -> None:
    assert rollout_batch([[5], [6]], [[], [1]])["response_mask"].to_lists() == [[], [True]]


def test_a_gap_in_the_mask_keeps_the_tokens_before_the_end() -> None:
    responses = Ragged.from_rows([[1, 2, 3, 4], [5], [], [6, 7]], torch.int32)
    mask = Ragged.from_rows([[True, False, True, False], [True], [], [False, False]], torch.bool)
    assert responses_to_lists(responses, mask) == [[1, 2, 3], [5], [], []]


@pytest.mark.parametrize(
    ("prompts", "responses", "log_probs", "message"),
    [
        ([[1]], [], None, "1 prompts but 0 responses"),
        ([[1], []], [[1], [1]], None, "prompt 1 is empty"),
        ([[1]], [[1, 2]], [[0.0]], "response 0 has 2 tokens but 1 log-probs"),
    ],
)
def test_what_does_not_fit_is_refused(prompts, responses, log_probs, message) -> None:
    with pytest.raises(ProtocolError, match=message):
        rollout_batch(prompts, responses, log_probs)


class TestCheckLayout:
    def proto(self, **columns: Ragged | torch.Tensor) -> DataProto:
        return DataProto.from_dict({**rollout_batch([[1, 2]], [[3]]), **columns})

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({Keys.VALUES: Ragged.from_rows([[1]], torch.float64)}, "'values' has torch.float64, wanted torch.float32"),
            ({Keys.VALUES: torch.zeros(1, 1)}, r"'values' is a tensor \[1, 1\], wanted a Ragged .*unpadded\(tensor\)"),
            (
                {Keys.VALUES: Ragged.from_rows([[1, 2]], torch.float32)},
                "'values' has 2 values in row 0, but 'response_mask' has 1: return one for each token of the response",
            ),
        ],
    )
    def test_wrong_columns_are_named(self, columns, message) -> None:
        with pytest.raises(ProtocolError, match=message):
            check_layout(self.proto(**columns))

    def test_an_answer_has_the_lengths_of_the_batch_that_was_sent(self) -> None:
        answer = DataProto.from_dict({Keys.VALUES: Ragged.from_rows([[1, 2]], torch.float32)})
        check_layout(answer)
        with pytest.raises(ProtocolError, match="'values' has 2 values in row 0, but 'response_mask' has 1"):
            check_layout(answer, self.proto())

    def test_unknown_columns_and_no_columns_pass(self) -> None:
        check_layout(self.proto(mine=torch.zeros(1, 7, 7)))
        check_layout(DataProto())

    def test_every_tensor_key_is_documented(self) -> None:
        of_objects = {
            "RAW_PROMPT",
            "SOURCE",
            "DATA_SOURCE",
            "GROUND_TRUTH",
            "EXTRA_INFO",
            "REWARD_ERROR",
            "REWARD_EXTRAS",
            "UID",
            "INDEX",
            "SAMPLE_INDEX",
        }
        names = {value for key, value in vars(Keys).items() if key.isupper() and key not in of_objects}
        assert names == FIELDS.keys()
