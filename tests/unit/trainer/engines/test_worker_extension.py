"""Which models' weights vLLM keeps as they come, so that they may be copied in; and which copies are read back."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ppojob_trainer.engines.rollout.options import WORKER_ADDRESS, WORKER_FAILURE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.trainer.engines.kept_weights"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    return seen


def test_only_plain_layers_keep_their_weights(found: dict[str, Any]) -> None:
    assert found["kept"] == {"plain": True, "quantized": False, "worked on": False}


def test_copied_weights_are_read_back_if_the_sender_wants_it(found: dict[str, Any]) -> None:
    assert found["changing"]["compared"] == "refused"
    assert found["changing"]["not compared"] == "loaded"
    assert found["right"]["compared"] == "read back"
    assert found["right"]["not compared"] == "loaded"


def test_partial_pushes_are_read_back_after_a_complete_one_that_was(found: dict[str, Any]) -> None:
    assert found["right"]["partial"] == "read back"
    assert found["right"]["partial after it"] == "loaded"


def test_a_worker_that_cannot_load_weights_takes_the_rest_of_them(found: dict[str, Any]) -> None:
    assert found["failure"] == {"answer": {WORKER_FAILURE: "no such weight", WORKER_ADDRESS: None}, "is_drained": True}


def test_a_worker_whose_loader_reads_only_a_part_takes_the_rest_too(found: dict[str, Any]) -> None:
    assert found["partial"] == {
        "answer": {WORKER_FAILURE: "only 0 of 1 buckets were loaded", WORKER_ADDRESS: None},
        "is_drained": True,
    }


def test_an_engine_warns_of_weights_that_no_worker_reads_and_not_of_experts_of_other_workers(
    found: dict[str, Any],
) -> None:
    assert found["logged"] == {
        "experts of others": [],
        "an expert of nobody": ["vLLM leaves out 1 weights of /model: ['expert 2']"],
        "one worker": [],
    }
