"""Ragged columns: rows in and out, padding and back, and how they are stored."""

import pickle

import numpy as np
import pytest
import torch

from ppojob_trainer.protocol import ProtocolError, Ragged, object_array
from ppojob_trainer.protocol.wire import Column, Piece, gather, num_bytes, pack

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def column(dtype: torch.dtype = torch.int32) -> Ragged:
    return Ragged.from_rows(ROWS, dtype)


class TestRows:
    def test_rows_come_back(self) -> None:
        assert column().to_lists() == ROWS
        assert [row.tolist() for row in column().rows()] == ROWS
        assert Ragged.from_rows([], torch.int32).to_lists() == []

    @pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 0, 3], [1], []])
    def test_any_rows_in_any_order(self, rows: list[int]) -> None:
        assert column().take(torch.tensor(rows, dtype=torch.int64)).to_lists() == [ROWS[row] for row in rows]

    @pytest.mark.parametrize("rows", [slice(1, 3), slice(0, 0), slice(3, 1), slice(-2, None), slice(0, 4, 2)])
    def test_slices(self, rows: slice) -> None:
        assert column().take(rows).to_lists() == ROWS[rows]

    def test_a_slice_shares_the_memory(self) -> None:
        whole = column()
        whole.take(slice(2, 4)).values[0] = 9
        assert whole.to_lists()[2] == [9]

    def test_parts_of_rows(self) -> None:
        lengths = torch.tensor([2, 0, 1, 0])
        assert column().tail(lengths).to_lists() == [[2, 3], [], [4], []]
        assert column().head(lengths).to_lists() == [[1, 2], [], [4], []]

    def test_sums_and_any_ignore_what_is_not_there(self) -> None:
        assert column().sums().tolist() == [6, 0, 4, 11]
        assert Ragged.from_rows([[True, False], [False], []], torch.bool).any().tolist() == [True, False, False]

    def test_concat(self) -> None:
        assert Ragged.concat([column(), column().take(slice(3, 4))]).to_lists() == [*ROWS, [5, 6]]

    def test_values_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ProtocolError, match="3 values do not fit lengths that sum up to 2"):
            Ragged(torch.zeros(3), torch.tensor([2]))
        with pytest.raises(ProtocolError, match=r"values \[T\] and lengths \[B\], got \[1, 3\] and \[1\]"):
            Ragged(torch.zeros(1, 3), torch.tensor([3]))


class TestPadding:
    def test_there_and_back(self) -> None:
        padded = column().padded()
        assert padded.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0], [5, 6, 0]]
        assert column().unpadded(padded.float() / 2).to_lists() == [[0.5, 1, 1.5], [], [2], [2.5, 3]]
        assert column().padded(4).shape == (4, 4)

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="row 0 has 3 tokens, more than the width 2"):
            column().padded(2)
        with pytest.raises(ProtocolError, match=r"a padded tensor \[4, R\] with R >= 3 is needed, got \[4, 2\]"):
            column().unpadded(torch.zeros(4, 2))


def sent(whole: Column) -> Column:
    """Store a column of four rows as two blocks, with protocol 5, and gather its rows 3, 0 and 2."""
    blocks = []
    for rows in (slice(0, 2), slice(2, 4)):
        buffers: list[pickle.PickleBuffer] = []
        packed = pack(whole.take(rows) if isinstance(whole, Ragged) else whole[rows])
        data = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
        # Ray's object store is read-only.
        blocks.append(pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers]))
    return gather(
        "x",
        [Piece(blocks[0], np.array([0]), np.array([1])), Piece(blocks[1], np.array([1, 0]), np.array([0, 2]))],
        3,
    )


class TestStoring:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
    def test_ragged_columns_come_back_writable(self, dtype: torch.dtype) -> None:
        found = sent(column(dtype))
        assert isinstance(found, Ragged)
        assert found.dtype == dtype
        assert found.to_lists() == [column(dtype).to_lists()[row] for row in (3, 0, 2)]
        found.values[0] = 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_tensors_come_back_writable(self, dtype: torch.dtype) -> None:
        whole = torch.arange(8).reshape(4, 2).to(dtype)
        found = sent(whole)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, whole[[3, 0, 2]])
        found.add_(1)

    def test_objects_come_back(self) -> None:
        found = sent(object_array(["a", {"b": 1}, None, [1]]))
        assert isinstance(found, np.ndarray)
        assert found.tolist() == [[1], "a", None]

    def test_values_go_out_of_band(self) -> None:
        buffers: list[pickle.PickleBuffer] = []
        whole = Ragged(torch.zeros(100_000), torch.tensor([100_000]))
        assert len(pickle.dumps(pack(whole), protocol=5, buffer_callback=buffers.append)) < 1000
        assert sum(buffer.raw().nbytes for buffer in buffers) == num_bytes(whole) == 400_008

    def test_a_block_has_its_rows_alone(self) -> None:
        assert num_bytes(Ragged(torch.zeros(1000), torch.tensor([999, 1])).take(slice(1, 2))) == 4 + 8
        assert len(pickle.dumps(pack(Ragged(torch.zeros(1000), torch.tensor([999, 1])).take(slice(1, 2))))) < 1000

    def test_gradients_are_left_behind(self) -> None:
        packed = pack(torch.ones(2, requires_grad=True))
        assert packed.values.tolist() == [1, 1]

    def test_parts_of_another_dtype_name_the_column(self) -> None:
        pieces = [
            Piece(pack(column(dtype)), np.array([0]), np.array([number]))
            for number, dtype in enumerate((torch.float32, torch.int32))
        ]
        with pytest.raises(ProtocolError, match=r"column 'x' as torch.float32.* and as torch.int32"):
            gather("x", pieces, 2)
