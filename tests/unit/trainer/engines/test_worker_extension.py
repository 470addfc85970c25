"""Which models' weights vLLM keeps as they come: only into those may they be copied."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_only_plain_layers_keep_their_weights() -> None:
    command = [sys.executable, "-m", "tests.unit.trainer.engines.kept_weights"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout

    assert json.loads(said.splitlines()[-1]) == {"plain": True, "quantized": False, "worked on": False}
