"""An engine in FP8 on one GPU, with vLLM's defaults: its weights are in FP8, it follows pushes, sleeps and wakes.

PPOJOB_TEST_MODEL names a folder with SmolLM2-135M-Instruct; without it the packaged model is converted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.models.smollm2 import prepare
from tests.integration.trainer.quantized_checks import check_correction, check_log_probs, check_read_back
from tests.integration.trainer.separate_process import seen_by
from tests.integration.trainer.vllm_agreement import FEW

LIMIT_SECONDS = 400
MODULE = "tests.integration.trainer.quantized_rollout"
# vLLM's kernel for the CPU has a gap of 0.031, that of old weights is 0.15. In bfloat16, it is 0.008.
LARGEST_GAP = 0.05

# The first GPUs with FP8 units.
pytestmark = pytest.mark.gpu(capability=(8, 9))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    given = os.environ.get("PPOJOB_TEST_MODEL")
    path = Path(given) if given else prepare(tmp_path_factory.mktemp("models") / "smollm2")
    found = seen_by(MODULE, str(path), "CUDA", "cuda_ipc", "0.0003", limit=LIMIT_SECONDS)
    print(json.dumps(found))
    return found


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_linear_layers_are_in_fp8_after_pushes_and_sleep(seen: dict[str, Any]) -> None:
    for found in (seen["bytes_at_start"], seen["bytes_at_end"]):
        formats = {name for name in found if name.startswith("quantized ")}
        assert formats == {"quantized float8_e4m3fn", "quantized float32"}
        assert found["quantized float8_e4m3fn"] > 10 * found["quantized float32"]
    assert seen["bytes_at_end"] == seen["bytes_at_start"]


def test_equal_weights_are_rounded_to_the_same_numbers(seen: dict[str, Any]) -> None:
    assert seen["equal_with_equal_weights"] == 1
    assert seen["equal_with_other_weights"] <= FEW


def test_log_probs_follow_the_pushed_weights(seen: dict[str, Any]) -> None:
    check_log_probs(seen, LARGEST_GAP)


def test_pushes_are_read_back(seen: dict[str, Any]) -> None:
    check_read_back(seen)


def test_the_correction_reports_the_gap(seen: dict[str, Any]) -> None:
    check_correction(seen)
