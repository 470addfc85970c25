"""Packing, micro-batches by a token budget, and that a packed model run equals the padded one."""

import random
from itertools import chain

import pytest
import torch

from ppojob_trainer.maths.log_probs import linear_log_probs, plain_log_probs
from ppojob_trainer.maths.losses import Denominators, policy_loss
from ppojob_trainer.maths.packing import micro_batches, num_micro_batches, pack
from ppojob_trainer.maths.policy_losses import PolicyLossInputs
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part


def test_the_worked_example() -> None:
    packed = pack(torch.tensor([5, 6, 7, 1, 2, 8, 3], dtype=torch.int32), torch.tensor([5, 2]))
    assert packed.input_ids.tolist() == [5, 6, 7, 1, 2, 8, 3]
    assert packed.input_ids.dtype == torch.int64
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 5, 7]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.labels.tolist() == [6, 7, 1, 2, 0, 3, 0]


def test_a_sequence_without_tokens() -> None:
    packed = pack(torch.tensor([1, 2, 4]), torch.tensor([2, 0, 1]))
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 3]
    assert packed.input_ids.tolist() == [1, 2, 4]
    assert packed.labels.tolist() == [2, 0, 0]


class TinyModel(torch.nn.Module):
    """One attention layer with positions: enough to feel any wrong mask, position or label."""

    def __init__(self, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width, dtype=torch.float64)
        self.positions = torch.nn.Embedding(64, width, dtype=torch.float64)
        self.qkv = torch.nn.Linear(width, 3 * width, dtype=torch.float64)
        self.head = torch.nn.Linear(width, vocabulary, bias=False, dtype=torch.float64)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        q, k, v = self.qkv(x).unsqueeze(-3).chunk(3, dim=-1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + attended.squeeze(-3)


def random_batch(rows: int = 6) -> DataProto:
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 32) for _ in range(rng.randint(1, 6))] for _ in range(rows)]
    responses = [[rng.randrange(1, 32) for _ in range(rng.randint(1, 8))] for _ in range(rows)]
    return DataProto.from_dict(rollout_batch(prompts, responses))


def padded_log_probs(model: TinyModel, batch: DataProto) -> torch.Tensor:
    inputs, responses = padded_inputs(batch), padded_responses(batch)
    length = inputs["input_ids"].shape[1]
    keys = inputs["attention_mask"].bool()[:, None, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    # Queries on padding see themselves, or the softmax over nothing would be NaN.
    mask = (causal & keys) | torch.eye(length, dtype=torch.bool)
    hidden = model.hidden(inputs["input_ids"], inputs["position_ids"], mask)
    log_probs, _ = plain_log_probs(model.head(hidden), inputs["input_ids"].roll(-1, dims=1))
    return response_part(log_probs, responses.shape[1]) * batch.padded(Keys.RESPONSE_MASK)


def packed_log_probs(model: TinyModel, batch: DataProto, width: int) -> torch.Tensor:
    """Return log-probs [B, width] of the response tokens."""
    sequences = batch.ragged(Keys.INPUT_IDS)
    packed = pack(sequences.values, sequences.lengths)
    lengths = packed.cu_seqlens.diff().tolist()
    mask = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()
    hidden = model.hidden(packed.input_ids, packed.position_ids, mask)
    log_probs, _ = linear_log_probs(hidden, model.head.weight, packed.labels, chunk_size=7)
    # The output at a token predicts the next one: of each sequence, drop the last, and then take the response's.
    predictions = sequences.with_values(log_probs).head(sequences.lengths - 1)
    return predictions.tail(batch.ragged(Keys.RESPONSE_MASK).lengths).padded(width)


@pytest.mark.parametrize("max_tokens", [1000, 30, 14])
def test_packed_micro_batches_give_the_padded_loss_and_gradient(max_tokens: int) -> None:
    torch.manual_seed(0)
    model, batch = TinyModel(), random_batch()
    mask = batch.padded(Keys.RESPONSE_MASK)
    old, advantages = torch.randn(2, *mask.shape, dtype=torch.float64)
    denominators = Denominators.of(mask)
    expected_log_probs = padded_log_probs(model, batch)
    expected, _ = policy_loss(PolicyLossInputs(expected_log_probs, old - 3, advantages, mask), denominators)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))

    lengths = batch.ragged(Keys.INPUT_IDS).lengths.tolist()
    total = 0.0
    for rows in micro_batches(lengths, max_tokens):
        log_probs = packed_log_probs(model, batch[rows], mask.shape[1])
        assert torch.allclose(log_probs, expected_log_probs[rows])
        loss, _ = policy_loss(PolicyLossInputs(log_probs, old[rows] - 3, advantages[rows], mask[rows]), denominators)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item())
    for parameter, gradient in zip(model.parameters(), expected_gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient)  # type: ignore[arg-type]


class TestMicroBatches:
    @pytest.mark.parametrize("seed", range(30))
    def test_each_keeps_to_the_budget_and_has_work(self, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 40))]
        budget = rng.randint(max(lengths), 300)
        needed = num_micro_batches(lengths, budget)
        for number in (needed, min(needed + 1, len(lengths)), len(lengths)):
            parts = micro_batches(lengths, budget, number)
            assert len(parts) == number
            assert sorted(chain.from_iterable(parts)) == list(range(len(lengths)))
            assert all(0 < sum(lengths[row] for row in part) <= budget for part in parts)

    def test_the_number_by_hand(self) -> None:
        assert num_micro_batches([10, 10, 10], 30) == 1
        assert num_micro_batches([10, 10, 10], 29) == 2
        # 31 tokens would fit twice into 16, but no division of 11, 10, 10 does.
        assert num_micro_batches([11, 10, 10], 16) == 3

    def test_a_sequence_that_cannot_fit_is_named(self) -> None:
        with pytest.raises(ValueError, match="sequence 1 has 50 tokens, more than the 40 of a micro-batch"):
            num_micro_batches([10, 50], 40)

    @pytest.mark.parametrize("number", [1, 4])
    def test_impossible_numbers_are_refused(self, number: int) -> None:
        with pytest.raises(ValueError, match=f"{number} micro-batches for 3 sequences that need 2"):
            micro_batches([10, 10, 10], 20, number)

    def test_a_division_that_fits_is_cut_up_where_more_parts_do_worse(self, monkeypatch) -> None:
        from ppojob_trainer.maths import packing

        divide = packing.karmarkar_karp
        monkeypatch.setattr(
            packing,
            "karmarkar_karp",
            lambda weights, number: [[0, 1, 2], [3], []] if number == 3 else divide(weights, number),
        )
        parts = packing.micro_batches([5, 5, 5, 5], 10, 3)
        assert sorted(len(part) for part in parts) == [1, 1, 2]
        assert sorted(chain.from_iterable(parts)) == [0, 1, 2, 3]
