"""What was copied into a model is what came, however the model fuses, ties and pads it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout import read_back
from ppojob_trainer.engines.rollout.read_back import ReadBack


class Fused(nn.Module):
    """Holds q, k and v in one weight, an embedding with rows to spare, and the same again as its output."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 4, dtype=dtype))
        self.embedding = nn.Parameter(torch.zeros(64, 4, dtype=dtype))
        self.output = self.embedding

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in "qkv":
                start = 4 * "qkv".index(name)
                self.qkv[start : start + 4].copy_(tensor)
            elif name == "embedding":
                self.embedding[:50].copy_(tensor)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (4, 4), "k": (4, 4), "v": (4, 4), "embedding": (50, 4)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def loaded(sent: dict[str, Tensor], model: Fused) -> ReadBack:
    transfer = ReadBack(version=20)
    model.load_weights(transfer.passing(sent.items()))
    return transfer


def test_a_model_that_holds_what_came_passes() -> None:
    model = Fused()
    assert loaded(weights(), model).check(model)


def test_a_weight_that_the_loader_leaves_out_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = Fused()
    # Fewer numbers would hide behind the rows to spare, and count as a loader that changes weights.
    for extra, is_refused in ((3, True), (60, False)):
        sent = weights() | {"bias": torch.ones(extra, dtype=torch.bfloat16)}
        with pytest.raises(WeightSyncError, match="for Fused left some out") if is_refused else nullcontext():
            loaded(sent, model).check(model)
    assert "vLLM's loader for Fused leaves out 4 of 308 numbers" in caplog.text


def test_a_weight_that_did_not_arrive_is_reported() -> None:
    model = Fused()
    loaded(weights(), model)
    newer = {name: tensor + 1 for name, tensor in weights().items() if name != "k"}
    with pytest.raises(WeightSyncError, match="not version 20"):
        loaded(newer, model).check(model)


def test_pieces_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "PIECE", 7)
    test_a_model_that_holds_what_came_passes()
    test_one_bit_is_seen()


def test_one_bit_is_seen() -> None:
    model = Fused()
    transfer = loaded(weights(), model)
    model.qkv.detach().view(torch.int16)[7, 2] ^= 1
    with pytest.raises(WeightSyncError):
        transfer.check(model)


def test_a_model_of_another_dtype_is_not_compared() -> None:
    model = Fused(torch.float32)
    assert not loaded(weights(), model).check(model)


def partly_loaded(sent: dict[str, Tensor], model: Fused, earlier: ReadBack) -> ReadBack:
    transfer = ReadBack(21, earlier)
    model.load_weights(transfer.passing(sent.items()))
    return transfer


@pytest.mark.parametrize("names", ["q", "qk", "qkv"])
def test_after_a_partial_transfer_the_rest_counts_as_it_came_before(names: str) -> None:
    model = Fused()
    earlier = loaded(weights(), model)
    assert earlier.check(model)
    for _ in range(2):
        newer = {name: tensor + 1 for name, tensor in weights().items() if name in names}
        assert partly_loaded(newer, model, earlier).check(model)
        assert partly_loaded({name: weights()[name] for name in names}, model, earlier).check(model)


@pytest.mark.parametrize("row", [0, 5, 11])
def test_a_partial_transfer_that_left_a_row_stale_or_changed_another_one_is_reported(row: int) -> None:
    model = Fused()
    earlier = loaded(weights(), model)
    before = model.qkv.detach()[row].clone()
    newer = {name: tensor + 1 for name, tensor in weights().items() if name in "qk"}
    transfer = partly_loaded(newer, model, earlier)
    # The last row did not come; others are put back to what they were.
    model.qkv.data[row] = before if row < 8 else before + 1
    with pytest.raises(WeightSyncError, match="not version 21"):
        transfer.check(model)
