"""The bytes of a batch between processes, with and without padding."""

import torch

from ppojob_trainer.protocol import Keys
from tests.bench.bench_batch_bytes import batch_of, main, measured


def test_sizes_by_hand() -> None:
    batch = batch_of(torch.tensor([2, 1]), torch.tensor([3, 1]))

    by_phase = {one.phase: one for one in measured(batch, 4, 8)}

    # Two rows of P = 4, R = 8: five int64 tensors of P, R, S, S, S, one of R, and log-probs.
    rollout = 8 * 2 * (4 + 8 + 3 * 12 + 8) + 4 * 2 * 8
    assert by_phase["gen"].padded == rollout
    assert by_phase["values"].padded == rollout + 4 * 2 * 8
    # 7 tokens and 4 response tokens; each column has two lengths of 8 bytes.
    sequences = 7 * 4 + 16 + 4 + 16
    assert by_phase["values"].ragged == sequences + (4 * 4 + 16)
    assert by_phase["update_critic"].ragged == sequences + 2 * (4 * 4 + 16)
    assert by_phase["step"].ragged == sum(one.ragged for one in by_phase.values() if one.phase != "step")


def test_long_sequences_of_mixed_lengths_take_a_tenth() -> None:
    sizes = main({"prompts": 64, "samples": 4, "prompt_length": 1024, "response_length": 16_384})

    step = sizes[-1]
    assert step.padded > 10 * step.ragged
    assert all(one.padded > 5 * one.ragged for one in sizes)


def test_even_full_sequences_take_less_than_a_third() -> None:
    batch = batch_of(torch.full((8,), 128), torch.full((8,), 512))

    assert batch.ragged(Keys.INPUT_IDS).lengths.tolist() == [640] * 8
    assert measured(batch, 128, 512)[-1].padded > 3 * measured(batch, 128, 512)[-1].ragged
