"""Which models' weights vLLM keeps as they come, so that they may be copied in; and which copies are read back."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.trainer.engines.kept_weights"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    return seen


def test_only_plain_layers_keep_their_weights(found: dict[str, Any]) -> None:
    assert found["kept"] == {"plain": True, "quantized": False, "worked on": False}


def test_the_first_and_each_tenth_copy_after_it_is_read_back(found: dict[str, Any]) -> None:
    assert found["refused"] == [0, 10, 20]
    assert found["right"] == [-1, -11, -21]


def test_a_model_that_is_divided_over_gpus_is_not_read_back(found: dict[str, Any]) -> None:
    assert found["divided"] == []
