"""DataProto: every operation on a batch of columns, and each refusal by its message."""

import numpy as np
import pytest
import torch

from ppojob_trainer.protocol import DataProto, Keys, ProtocolError, Ragged, object_array, rollout_batch


def make(rows: int = 4, /, **meta: object) -> DataProto:
    """Row n has n + 1 tokens, each n."""
    numbers = torch.arange(rows)
    return DataProto.from_dict(
        {"tokens": Ragged.from_rows([[row] * (row + 1) for row in range(rows)], torch.int32), "number": numbers},
        {Keys.UID: [f"u{row}" for row in range(rows)], "lists": [[row, 0] for row in range(rows)]},
        meta,
    )


class TestBuilding:
    def test_lists_of_equal_length_stay_lists(self) -> None:
        assert make(2).array("lists").tolist() == [[0, 0], [1, 0]]
        assert make(2).array("lists").shape == (2,)

    def test_length_is_that_of_any_column(self) -> None:
        assert len(make(3)) == 3
        assert len(DataProto.from_dict({"a": Ragged.from_rows([[1, 2], []], torch.int32)})) == 2
        assert len(DataProto.from_dict(non_tensors={"a": [1, 2]})) == 2
        assert len(DataProto()) == 0

    @pytest.mark.parametrize(
        ("tensors", "arrays", "message"),
        [
            ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, "column 'b' has 3 rows, but 'a' has 2"),
            (
                {"a": torch.zeros(2), "b": Ragged.from_rows([[1]], torch.int32)},
                {},
                "column 'b' has 1 rows, but 'a' has 2",
            ),
            ({"a": torch.zeros(2), "b": torch.tensor(1.0)}, {}, "column 'b' is a single number"),
            ({"a": torch.zeros(2)}, {"c": [1]}, "'c' has 1 rows, but 'a' has 2"),
            ({}, {"c": [1], "d": [1, 2]}, "'d' has 2 rows, but 'c' has 1"),
        ],
    )
    def test_sizes_that_do_not_fit_name_the_column(self, tensors, arrays, message) -> None:
        with pytest.raises(ProtocolError, match=message):
            DataProto.from_dict(tensors, arrays)

    def test_a_numeric_array_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="'a' must be a 1-d object array"):
            DataProto({}, {"a": np.zeros(3)})

    def test_object_array_keeps_nested_lists(self) -> None:
        assert object_array([[1, 2], [3, 4]]).shape == (2,)
        assert object_array(iter([])).shape == (0,)


class TestColumns:
    def test_a_ragged_column_is_read_as_it_is_or_padded(self) -> None:
        assert make(2).ragged("tokens").to_lists() == [[0], [1, 1]]
        assert make(2).padded("tokens").tolist() == [[0, 0], [1, 1]]
        assert make(2).padded("tokens", 3).tolist() == [[0, 0, 0], [1, 1, 0]]
        assert make(2).tensor("number").tolist() == [0, 1]

    def test_the_wrong_way_of_reading_says_the_right_one(self) -> None:
        with pytest.raises(ProtocolError, match=r"'tokens' is ragged: read it with ragged\(\), or with padded\(\)"):
            make(2).tensor("tokens")
        with pytest.raises(ProtocolError, match=r"'number' is a tensor \[2\]: read it with tensor\(\)"):
            make(2).padded("number")

    @pytest.mark.parametrize("read", ["ragged", "padded", "tensor", "array"])
    def test_a_column_that_is_missing_or_was_not_sent_is_named(self, read) -> None:
        batch = DataProto.of_columns(dict(make(2).items()), {}, {"values"})
        with pytest.raises(ProtocolError, match=r"no column 'no' of this kind; there are \["):
            getattr(batch, read)("no")
        with pytest.raises(ProtocolError, match="'values' was not sent: add it to `reads` in the method's @register"):
            getattr(batch[:1], read)("values")
        assert "values" not in batch

    def test_prompts_and_responses_are_parts_of_the_sequences(self) -> None:
        batch = DataProto.from_dict(rollout_batch([[5, 6, 7], [8]], [[1, 2], []]))
        assert batch.prompts().to_lists() == [[5, 6, 7], [8]]
        assert batch.responses().to_lists() == [[1, 2], []]

    def test_select_keeps_only_the_named(self) -> None:
        chosen = make(2, x=1).select(["number"])
        assert dict(chosen.items()).keys() == {"number"}
        assert chosen.meta_info == {"x": 1}
        with pytest.raises(ProtocolError, match="no column 'no'"):
            make(2).select(["no"])

    def test_with_fields_replaces_in_the_copy_only(self) -> None:
        batch = make(2)
        other = batch.with_fields({"number": torch.zeros(2)}, {"more": ["a", "b"]})
        assert other.tensor("number").sum() == 0
        assert "more" in other
        assert "more" not in batch
        assert batch.tensor("number").sum() == 1


class TestRows:
    @pytest.mark.parametrize(
        ("index", "expected"),
        [
            (slice(1, 3), [1, 2]),
            (slice(None, None, 2), [0, 2]),
            ([3, 0, 0], [3, 0, 0]),
            (np.array([2, 1]), [2, 1]),
            (torch.tensor([True, False, False, True]), [0, 3]),
            (np.array([False, True, False, False]), [1]),
            (2, [2]),
            (-1, [3]),
            (slice(0, 0), []),
        ],
    )
    def test_indexing(self, index, expected) -> None:
        part = make(4)[index]
        assert part.tensor("number").tolist() == expected
        assert part.ragged("tokens").to_lists() == [[row] * (row + 1) for row in expected]
        assert part.array(Keys.UID).tolist() == [f"u{number}" for number in expected]

    def test_a_row_that_is_not_there(self) -> None:
        with pytest.raises(IndexError, match="row 4 of a batch of 4"):
            make(4)[4]
        with pytest.raises(ProtocolError, match="boolean mask"):
            make(4)[torch.tensor([True])]

    def test_split_leaves_a_smaller_last_part_and_keeps_meta_info(self) -> None:
        parts = make(5, x=1).split(2)
        assert [part.tensor("number").tolist() for part in parts] == [[0, 1], [2, 3], [4]]
        assert all(part.meta_info == {"x": 1} for part in parts)
        with pytest.raises(ProtocolError, match="split into parts of 0 rows"):
            make(5).split(0)
