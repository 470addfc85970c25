"""An engine in FP8 of two workers, on the CPU: both compare their pushes, and a worker that waits is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.separate_process import LIMIT_S, seen_by
from tests.integration.trainer.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(LIMIT_S + 60)]

MODULE = "tests.integration.trainer.divided_quantized_engine"
SOON_S = 150.0
"""Half of the engine's usual limit, which nothing of the failed push waits for."""
LARGEST_GAP = 1.0
"""Of log-probs, by the mean. Random weights suffer from rounding: with one worker, the engine is apart by 0.35."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_attention_heads=4, head_dim=32)
    return seen_by(MODULE, str(model), limit=LIMIT_S)


def test_the_engine_follows_the_weights_and_both_workers_compare_their_parts(seen: dict[str, Any]) -> None:
    for push in ("first", "new"):
        assert seen[push]["apart"] < LARGEST_GAP, push
        assert seen[push]["is_read_back"] == [True, True], push
    assert seen["stale"] > 3 * LARGEST_GAP


def test_a_weight_that_changes_before_one_workers_loader_is_refused(seen: dict[str, Any]) -> None:
    assert "vLLM's worker 1 failed in ppojob_receive_weights" in seen["refusal"]
    assert "in FP8, though all of it arrived: the sum of the bits that were loaded is " in seen["refusal"]
    # The other worker's answer is not taken for that of the next call.
    assert seen["after refusal"]["is_read_back"] == [True, True]
    assert seen["after refusal"]["apart"] < LARGEST_GAP


def test_an_engine_whose_worker_waits_for_one_that_failed_is_lost(seen: dict[str, Any]) -> None:
    failed = seen["failed"]
    assert "vLLM's workers (2) did not all finish ppojob_receive_weights within 10 s" in failed["says"]
    assert failed["check"] == failed["says"]
    assert failed["seconds"] < SOON_S


def test_a_lost_engine_leaves_no_processes(seen: dict[str, Any]) -> None:
    assert seen["left"] == []
    assert seen["shutdown_seconds"] < SOON_S
