"""Packing a rollout: which output speaks about which response token."""

import pytest
import torch

from ppojob_trainer.engines.train.batch import MicroBatchPlan, build_micro_batches, split_minibatches
from ppojob_trainer.protocol import DataProto, Keys, ProtocolError, Ragged, rollout_batch

CPU = torch.device("cpu")


def two_sequences() -> DataProto:
    return DataProto.from_dict(rollout_batch([[5, 6, 7], [8]], [[1, 2], [3]]))


def test_the_output_at_the_last_prompt_token_speaks_about_the_first_response_token() -> None:
    (micro,) = build_micro_batches(two_sequences(), MicroBatchPlan(1, 16), (Keys.RESPONSE_MASK,), 2, CPU)
    assert micro.tokens.input_ids.tolist() == [[5, 6, 7, 1, 2, 8, 3]]
    assert micro.tokens.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert micro.tokens.segments.lengths == (5, 2)
    assert micro.tokens.segments.cu_seqlens.tolist() == [0, 5, 7]
    assert micro.tokens.rows.tolist() == [2, 3, 5]
    assert micro.tokens.labels.tolist() == [1, 2, 3]


def test_spread_puts_values_where_the_response_mask_is_1() -> None:
    (micro,) = build_micro_batches(two_sequences(), MicroBatchPlan(1, 16), (Keys.RESPONSE_MASK,), 2, CPU)
    assert micro.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert micro.fields[Keys.RESPONSE_MASK].tolist() == [[1, 1], [1, 0]]


def test_padded_fields_have_the_width_of_the_job_and_not_of_the_micro_batch() -> None:
    (micro,) = build_micro_batches(two_sequences(), MicroBatchPlan(1, 16), (Keys.RESPONSE_MASK,), 4, CPU)
    assert micro.fields[Keys.RESPONSE_MASK].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert micro.spread(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]]
    with pytest.raises(ProtocolError, match="row 0 has 2 tokens, more than the width 1"):
        list(build_micro_batches(two_sequences(), MicroBatchPlan(1, 16), (Keys.RESPONSE_MASK,), 1, CPU))


def test_experts_lie_with_their_tokens_and_those_of_the_last_tokens_are_not_recorded() -> None:
    recorded = Ragged.from_rows([[1, 2, 3, 4, 5, 6, 7, 8], [254, 255]], torch.uint8)
    batch = two_sequences().with_fields({Keys.ROUTED_EXPERTS: recorded})
    (micro,) = build_micro_batches(batch, MicroBatchPlan(1, 16), (), 2, CPU)
    assert micro.tokens.experts is not None
    assert micro.tokens.experts.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [-1, -1], [254, 255], [-1, -1]]
    assert next(iter(build_micro_batches(two_sequences(), MicroBatchPlan(1, 16), (), 2, CPU))).tokens.experts is None


def test_experts_of_other_tokens_are_refused() -> None:
    recorded = Ragged.from_rows([[1, 2, 3, 4, 5, 6], [7, 8, 9]], torch.uint8)
    batch = two_sequences().with_fields({Keys.ROUTED_EXPERTS: recorded})
    says = "row 0 has 6 values in 'routed_experts', which are not 1 for each of its 5 tokens but the last"
    with pytest.raises(ProtocolError, match=says):
        list(build_micro_batches(batch, MicroBatchPlan(1, 16), (), 2, CPU))


def test_tokens_that_the_policy_did_not_write_are_not_computed() -> None:
    batch = two_sequences()
    mask = batch.ragged(Keys.RESPONSE_MASK)
    batch = batch.with_fields({Keys.RESPONSE_MASK: mask.with_values(torch.tensor([False, True, False]))})
    (micro,) = build_micro_batches(batch, MicroBatchPlan(1, 16), (), 2, CPU)
    assert micro.tokens.rows.tolist() == [3]
    assert micro.spread(torch.tensor([4.0])).tolist() == [[0.0, 4.0], [0.0, 0.0]]


def test_micro_batches_hold_every_sequence_once() -> None:
    batch = DataProto.from_dict(rollout_batch([[1] * n for n in range(1, 7)], [[2]] * 6))
    found = list(build_micro_batches(batch, MicroBatchPlan(4, 8), (), 1, CPU))
    assert len(found) == 4
    assert sorted(torch.cat([micro.indices for micro in found]).tolist()) == list(range(6))
    assert all(micro.tokens.input_ids.numel() <= 8 for micro in found)


@pytest.mark.parametrize("number", [0, 4, 5])
def test_a_shard_that_cannot_be_cut_into_equal_minibatches_is_refused(number: int) -> None:
    batch = DataProto.from_dict(rollout_batch([[1]] * 6, [[2]] * 6))
    with pytest.raises(ProtocolError, match=f"6 sequences cannot be split into {number} equal minibatches"):
        split_minibatches(batch, number)
