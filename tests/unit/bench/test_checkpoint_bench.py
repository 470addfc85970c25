"""What the benchmark of checkpoints counts as standing still."""

from __future__ import annotations

import torch

from tests.bench.bench_checkpoint import SAVED, WAITED, make_batch, standstills


def test_the_loop_stands_still_at_the_save_and_in_the_next_update_but_the_last_save_is_not_counted() -> None:
    steps: dict[int, dict[str, float]] = {
        1: {},
        2: {SAVED: 0.5},
        3: {WAITED: 0.25},
        4: {SAVED: 1.0},
        5: {},
        6: {SAVED: 40.0},
    }
    assert standstills(steps) == [0.75, 1.0]


def test_a_batch_has_the_lengths_of_the_workload() -> None:
    batch = make_batch(8, 16, 4)
    assert batch.ragged("input_ids").lengths.tolist() == [20] * 8
    assert torch.equal(batch.ragged("response_mask").lengths, torch.full((8,), 4))
