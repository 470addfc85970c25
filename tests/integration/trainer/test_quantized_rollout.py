"""An engine in FP8 follows the trainer's weights, on the CPU: all of vLLM is real, with its kernel for the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.trainer.quantized_checks import check_correction, check_log_probs, check_read_back
from tests.integration.trainer.separate_process import LIMIT_S, seen_by
from tests.integration.trainer.tiny_model import write_tiny_model
from tests.integration.trainer.vllm_agreement import FEW

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]

# Random weights suffer more from rounding than trained ones.
LARGEST_GAP = 0.07
MODULE = "tests.integration.trainer.quantized_rollout"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return seen_by(MODULE, str(model), "CPU", "gloo", "0.01", limit=LIMIT_S)


def test_the_engines_weights_are_in_fp8_and_stay_so(seen: dict[str, Any]) -> None:
    hidden, key, intermediate, layers = 64, 32, 128, 2
    outputs = hidden + 2 * key + hidden + 2 * intermediate + hidden
    inputs = hidden * (hidden + 2 * key) + hidden * hidden + hidden * 2 * intermediate + intermediate * hidden
    assert seen["bytes_at_start"]["quantized float8_e4m3fn"] == layers * inputs
    assert seen["bytes_at_start"]["quantized float32"] == layers * outputs * 4
    assert seen["bytes_at_end"] == seen["bytes_at_start"]


def test_equal_weights_are_rounded_to_the_same_numbers(seen: dict[str, Any]) -> None:
    assert seen["equal_with_equal_weights"] == 1
    assert seen["equal_with_other_weights"] <= FEW


def test_log_probs_follow_the_pushed_weights(seen: dict[str, Any]) -> None:
    assert seen["diff_at_start"] > 0.01
    assert seen["moved_by"] > 0.2
    check_log_probs(seen, LARGEST_GAP)


def test_pushes_are_read_back(seen: dict[str, Any]) -> None:
    check_read_back(seen)


def test_the_correction_reports_the_gap(seen: dict[str, Any]) -> None:
    assert check_correction(seen) < 1
