"""The padded layout: the worked example of the docstring, and what is refused."""

import pytest
import torch

from ppojob_trainer.protocol import (
    FIELDS,
    DataProto,
    Keys,
    ProtocolError,
    check_layout,
    response_part,
    responses_to_lists,
    rollout_batch,
)


def test_the_worked_example() -> None:
    tensors = rollout_batch([[5, 6, 7], [8]], [[1, 2], [3]], pad_token_id=0, log_probs=[[-0.5, -1.0], [-2.0]])
    assert {key: value.tolist() for key, value in tensors.items()} == {
        "prompts": [[5, 6, 7], [0, 0, 8]],
        "responses": [[1, 2], [3, 0]],
        "input_ids": [[5, 6, 7, 1, 2], [0, 0, 8, 3, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]],
        "position_ids": [[0, 1, 2, 3, 4], [0, 0, 0, 1, 1]],
        "response_mask": [[1, 1], [1, 0]],
        "rollout_log_probs": [[-0.5, -1.0], [-2.0, 0.0]],
    }
    check_layout(DataProto.from_dict(tensors))


def test_fixed_widths() -> None:
    tensors = rollout_batch([[5]], [[1]], pad_token_id=9, prompt_length=3, response_length=2)
    assert tensors["input_ids"].tolist() == [[9, 9, 5, 1, 9]]


def test_an_empty_response_is_all_padding() -> None:
    tensors = rollout_batch([[5], [6]], [[], [1]], pad_token_id=0)
    assert tensors["response_mask"].tolist() == [[0], [1]]


def test_response_part_lines_up_with_the_response_tokens() -> None:
    tensors = rollout_batch([[5, 6, 7], [8]], [[1, 2], [3]], pad_token_id=0)
    following = tensors["input_ids"].roll(-1, dims=1)
    assert torch.equal(response_part(following, 2), tensors["responses"])


def test_lists_come_back_without_padding() -> None:
    responses = [[1, 2, 3], [4], []]
    tensors = rollout_batch([[1], [1], [1]], responses, pad_token_id=0)
    assert responses_to_lists(tensors["responses"], tensors["response_mask"]) == responses


def test_a_gap_in_the_mask_keeps_the_tokens_before_the_end() -> None:
    assert responses_to_lists(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 0, 1, 0]])) == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("prompts", "responses", "options", "message"),
    [
        ([[1]], [], {}, "1 prompts but 0 responses"),
        ([[1], []], [[1], [1]], {}, "prompt 1 is empty"),
        ([[1, 2, 3]], [[1]], {"prompt_length": 2}, "prompt 0 has 3 tokens, more than the prompt length 2"),
        ([[1]], [[1, 2]], {"response_length": 1}, "response 0 has 2 tokens, more than the response length 1"),
        ([[1]], [[1, 2]], {"log_probs": [[0.0]]}, "response 0 has 2 tokens but 1 log-probs"),
    ],
)
def test_what_does_not_fit_is_refused(prompts, responses, options, message) -> None:
    with pytest.raises(ProtocolError, match=message):
        rollout_batch(prompts, responses, 0, **options)


class TestCheckLayout:
    def proto(self, **fields: torch.Tensor) -> DataProto:
        return DataProto.from_dict({**rollout_batch([[1, 2]], [[3]], 0), **fields})

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {Keys.VALUES: torch.zeros(1, 1, dtype=torch.float64)},
                r"'values' is torch.float64\[1, 1\], wanted torch.float32\[B, R\]",
            ),
            ({Keys.VALUES: torch.zeros(1, 1, 1)}, "wanted torch.float32"),
            ({Keys.VALUES: torch.zeros(1, 2)}, "'values' has R = 2, but 'responses' has R = 1"),
            ({Keys.PROMPTS: torch.zeros(1, 3, dtype=torch.int64)}, "which is not prompt length 3"),
        ],
    )
    def test_wrong_fields_are_named(self, fields, message) -> None:
        with pytest.raises(ProtocolError, match=message):
            check_layout(self.proto(**fields))

    def test_unknown_fields_and_no_tensors_pass(self) -> None:
        check_layout(self.proto(mine=torch.zeros(1, 7, 7)))
        check_layout(DataProto())

    def test_every_tensor_key_is_documented(self) -> None:
        tensors = {
            "PROMPT_IDS",
            "RAW_PROMPT",
            "DATA_SOURCE",
            "GROUND_TRUTH",
            "EXTRA_INFO",
            "REWARD_ERROR",
            "UID",
            "INDEX",
            "SAMPLE_INDEX",
        }
        names = {value for key, value in vars(Keys).items() if key.isupper() and key not in tensors}
        assert names == FIELDS.keys()
