"""DataProto: every operation on a table of values, and each refusal by its message."""

import pickle
from itertools import chain

import numpy as np
import pytest
import torch

from ppojob_trainer.protocol import DataProto, Keys, Meta, ProtocolError, object_array


def make(rows: int = 4, start: int = 0, /, **meta: object) -> DataProto:
    numbers = torch.arange(start, start + rows)
    return DataProto.from_dict(
        {"values": numbers.float().unsqueeze(1) * torch.ones(1, 2), "responses": numbers.unsqueeze(1)},
        {
            Keys.UID: [f"u{number}" for number in numbers.tolist()],
            "lists": [[number, 0] for number in numbers.tolist()],
        },
        meta,
    )


def ids(proto: DataProto) -> list[int]:
    return proto.tensor("responses").flatten().tolist()


def uids(proto: DataProto) -> list[str]:
    return proto.array(Keys.UID).tolist()


class TestBuilding:
    def test_lists_of_equal_length_stay_lists(self) -> None:
        assert make(2).array("lists").tolist() == [[0, 0], [1, 0]]
        assert make(2).array("lists").shape == (2,)

    def test_length_is_that_of_tensors_or_of_arrays(self) -> None:
        assert len(make(3)) == 3
        assert len(DataProto.from_dict(non_tensors={"a": [1, 2]})) == 2
        assert len(DataProto()) == 0

    @pytest.mark.parametrize(
        ("tensors", "arrays", "message"),
        [
            ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, r"field 'b' has shape \[3\], but 'a' has 2 rows"),
            ({"a": torch.zeros(2), "b": torch.tensor(1.0)}, {}, r"field 'b' has shape \[\]"),
            ({"a": torch.zeros(2)}, {"c": [1]}, "'c' has 1 rows, the batch has 2"),
            ({}, {"c": [1], "d": [1, 2]}, "'d' has 2 rows, the batch has 1"),
        ],
    )
    def test_sizes_that_do_not_fit_name_the_field(self, tensors, arrays, message) -> None:
        with pytest.raises(ProtocolError, match=message):
            DataProto.from_dict(tensors, arrays)

    def test_a_numeric_array_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="'a' must be a 1-d object array"):
            DataProto(None, {"a": np.zeros(3)})


class TestFields:
    def test_select_keeps_only_the_named(self) -> None:
        chosen = make(2, x=1, y=2).select(["values"], [Keys.UID], ["x"])
        assert chosen.keys() == {"values", Keys.UID}
        assert chosen.meta_info == {"x": 1}

    def test_select_of_nothing_keeps_all(self) -> None:
        assert make(2, x=1).select().keys() == make(2).keys()

    def test_select_without_tensors_keeps_the_rows(self) -> None:
        assert len(make(3).select([], [Keys.UID])) == 3

    @pytest.mark.parametrize("keys", [(["no"], [], []), ([], ["no"], []), ([], [], ["no"])])
    def test_unknown_fields_say_which_there_are(self, keys) -> None:
        with pytest.raises(ProtocolError, match=r"'no'; there are \["):
            make(2).select(*keys)

    def test_pop_takes_away(self) -> None:
        proto = make(2, x=1, y=2)
        taken = proto.pop(["values"], [Keys.UID], ["x"])
        assert taken.keys() == {"values", Keys.UID}
        assert proto.keys() == {"responses", "lists"}
        assert (taken.meta_info, proto.meta_info) == ({"x": 1}, {"y": 2})

    def test_pop_of_all_tensors_leaves_the_arrays(self) -> None:
        proto = make(2)
        proto.pop(["values", "responses"])
        assert proto.batch is None
        assert len(proto) == 2

    def test_with_fields_replaces_in_the_copy_only(self) -> None:
        proto = make(2)
        other = proto.with_fields({"values": torch.zeros(2, 2)}, {"more": ["a", "b"]})
        assert other.tensor("values").sum() == 0
        assert "more" in other
        assert "more" not in proto
        assert proto.tensor("values").sum() == 2


class TestUnion:
    def test_joins_and_allows_equal_fields(self) -> None:
        left, right = make(2, x=1), make(2, x=1, y=2).with_fields({"more": torch.ones(2)})
        joined = left.union(right)
        assert joined.keys() == {"values", "responses", Keys.UID, "lists", "more"}
        assert joined.meta_info == {"x": 1, "y": 2}

    def test_nan_equals_nan(self) -> None:
        proto = DataProto.from_dict({"a": torch.tensor([float("nan")])}, {"b": [float("nan")]})
        copy = pickle.loads(pickle.dumps(proto))
        assert proto.union(copy).keys() == {"a", "b"}

    @pytest.mark.parametrize(
        ("right", "message"),
        [
            (make(2).with_fields({"values": torch.zeros(2, 2)}), "tensor field 'values'"),
            (make(2).with_fields({"values": torch.zeros(2, 3)}), "tensor field 'values'"),
            (make(2).with_fields(None, {Keys.UID: ["u0", "other"]}), "non-tensor field 'uid'"),
            (make(2).with_fields(None, {"lists": [[0, 0], [1, 1]]}), "non-tensor field 'lists'"),
            (make(2, x=2), "meta_info entry 'x'"),
            (make(3), "2 rows with 3 rows"),
        ],
    )
    def test_a_clash_names_the_key(self, right, message) -> None:
        with pytest.raises(ProtocolError, match=message):
            make(2, x=1).union(right)


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
        assert ids(part) == expected
        assert uids(part) == [f"u{number}" for number in expected]

    def test_iterating_yields_single_rows(self) -> None:
        assert [ids(row) for row in make(3)] == [[0], [1], [2]]

    def test_a_row_that_is_not_there(self) -> None:
        with pytest.raises(IndexError, match="row 4 of a batch of 4"):
            make(4)[4]
        with pytest.raises(ProtocolError, match="boolean mask"):
            make(4)[torch.tensor([True])]

    def test_split_leaves_a_smaller_last_part(self) -> None:
        assert [ids(part) for part in make(5).split(2)] == [[0, 1], [2, 3], [4]]

    def test_chunks_are_equal_and_keep_meta_info(self) -> None:
        parts = make(4, x=1).chunk(2)
        assert [ids(part) for part in parts] == [[0, 1], [2, 3]]
        assert all(part.meta_info == {"x": 1} for part in parts)

    def test_chunk_refuses_what_does_not_divide(self) -> None:
        with pytest.raises(
            ProtocolError, match=r"5 rows cannot be split into 2 equal chunks: pad_to_divisor\(2\) first"
        ):
            make(5).chunk(2)

    def test_concat_undoes_chunk(self) -> None:
        whole = make(6, x=1)
        again = DataProto.concat(whole.chunk(3))
        assert ids(again) == ids(whole)
        assert uids(again) == uids(whole)
        assert again.meta_info == {"x": 1}

    def test_concat_joins_metrics_and_refuses_other_differences(self) -> None:
        left = make(1, **{Meta.METRICS: {"loss": [1.0]}})
        right = make(1, **{Meta.METRICS: {"loss": [2.0], "kl": [3.0]}})
        assert DataProto.concat([left, right]).meta_info == {Meta.METRICS: {"loss": [1.0, 2.0], "kl": [3.0]}}
        assert left.meta_info == {Meta.METRICS: {"loss": [1.0]}}
        with pytest.raises(ProtocolError, match="meta_info entry 'x'"):
            DataProto.concat([make(1, x=1), make(1, x=2)])

    def test_concat_names_fields_that_only_some_have(self) -> None:
        with pytest.raises(ProtocolError, match=r"part 1 of concat differs from part 0 in the fields \['values'\]"):
            DataProto.concat([make(1), make(1).select(["responses"])])
        with pytest.raises(ProtocolError, match="no parts"):
            DataProto.concat([])

    def test_repeat(self) -> None:
        assert ids(make(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
        assert uids(make(2).repeat(2, interleave=False)) == ["u0", "u1", "u0", "u1"]

    def test_reorder(self) -> None:
        assert ids(make(3).reorder([2, 0, 1])) == [2, 0, 1]
        assert uids(make(3).reorder(torch.tensor([2, 0, 1]))) == ["u2", "u0", "u1"]

    @pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3]])
    def test_reorder_refuses_what_is_no_permutation(self, order) -> None:
        with pytest.raises(ProtocolError, match=r"permutation of 0\.\.2"):
            make(3).reorder(order)


class TestPadding:
    @pytest.mark.parametrize(("rows", "divisor", "added"), [(4, 2, 0), (5, 4, 3), (1, 4, 3), (2, 5, 3)])
    def test_padding_and_back(self, rows, divisor, added) -> None:
        padded, number = make(rows).pad_to_divisor(divisor)
        assert number == added
        assert len(padded) % divisor == 0
        assert ids(padded.unpad(number)) == list(range(rows))

    def test_rows_of_padding_weigh_nothing(self) -> None:
        proto = make(3).with_fields({Keys.RESPONSE_MASK: torch.ones(3, 2, dtype=torch.int64)})
        padded, _ = proto.pad_to_divisor(2)
        assert padded.tensor(Keys.RESPONSE_MASK).sum(dim=1).tolist() == [2, 2, 2, 0]
        assert ids(padded) == [0, 1, 2, 0]

    def test_metrics_are_not_counted_twice(self) -> None:
        padded, _ = make(1, **{Meta.METRICS: {"loss": [1.0]}}).pad_to_divisor(2)
        assert padded.meta_info == {Meta.METRICS: {"loss": [1.0]}}

    def test_an_empty_batch_stays_empty(self) -> None:
        padded, number = make(4)[:0].pad_to_divisor(2)
        assert (len(padded), number) == (0, 0)

    def test_unpad_refuses_more_than_there_is(self) -> None:
        with pytest.raises(ProtocolError, match="cannot take 3 rows of padding from 2 rows"):
            make(2).unpad(3)


class TestIterator:
    def test_in_order_without_a_seed(self) -> None:
        assert [ids(part) for part in make(4).make_iterator(2, epochs=2)] == [[0, 1], [2, 3], [0, 1], [2, 3]]

    def test_each_epoch_sees_every_row_in_an_order_of_its_own(self) -> None:
        batches = [ids(part) for part in make(64).make_iterator(16, epochs=2, seed=3)]
        first, second = list(chain.from_iterable(batches[:4])), list(chain.from_iterable(batches[4:]))
        assert sorted(first) == sorted(second) == list(range(64))
        assert first != second != list(range(64))

    def test_the_seed_decides(self) -> None:
        orders = [[ids(part) for part in make(16).make_iterator(4, seed=seed)] for seed in (1, 1, 2)]
        assert orders[0] == orders[1] != orders[2]

    def test_it_refuses_at_once(self) -> None:
        with pytest.raises(ProtocolError, match="minibatches of 3 rows do not divide the batch of 4"):
            make(4).make_iterator(3)


class TestPickle:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
    def test_dtypes_come_back(self, dtype) -> None:
        values = torch.tensor([[0, 1], [1, 0]]).to(dtype)
        again = pickle.loads(pickle.dumps(DataProto.from_dict({"a": values}), protocol=5))
        assert again.tensor("a").dtype == dtype
        assert torch.equal(again.tensor("a"), values)

    def test_a_slice_sends_only_its_rows(self) -> None:
        proto = DataProto.from_dict({"a": torch.zeros(1000, 1000)})
        assert len(pickle.dumps(proto[:1], protocol=5)) < 6000

    def test_tensors_go_out_of_band_and_arrive_writable(self) -> None:
        buffers: list[pickle.PickleBuffer] = []
        proto = DataProto.from_dict({"a": torch.ones(100, 100), "b": torch.ones(100)}, {"c": [None] * 100}, {"x": 1})
        data = pickle.dumps(proto, protocol=5, buffer_callback=buffers.append)
        assert (len(buffers), len(data) < 4000) == (2, True)
        again = pickle.loads(data, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])
        again.tensor("a").add_(1)
        assert again.tensor("a").sum() == 20_000
        assert again.meta_info == {"x": 1}

    def test_gradients_and_empty_batches(self) -> None:
        proto = DataProto.from_dict({"a": torch.ones(2, requires_grad=True)})
        assert pickle.loads(pickle.dumps(proto)).tensor("a").requires_grad is False
        assert len(pickle.loads(pickle.dumps(DataProto()))) == 0
        assert len(pickle.loads(pickle.dumps(proto[:0]))) == 0


def test_to_moves_the_tensors() -> None:
    assert make(2).to("meta").tensor("values").device.type == "meta"


def test_object_array_keeps_nested_lists() -> None:
    assert object_array([[1, 2], [3, 4]]).shape == (2,)
    assert object_array(iter([])).shape == (0,)
