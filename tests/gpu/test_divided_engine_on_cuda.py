"""A vLLM engine of two GPUs follows pushed weights, and both GPUs' parameters are read back: over NCCL and CUDA IPC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.divided_engine import SLICES, STAGES, assert_follows, divided
from tests.integration.trainer.tiny_model import INITIALIZER_RANGE, write_tiny_model

pytestmark = pytest.mark.gpu(2)

LIMIT_SECONDS = 300
# 170 million parameters. One KV head is on both GPUs, and the 257 tokens of the vocabulary are 160 and 97.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "initializer_range": INITIALIZER_RANGE / 4,
}


@pytest.fixture(scope="module", params=[SLICES, STAGES])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model: Path = write_tiny_model(tmp_path_factory.mktemp("model"), **SHAPE)
    found = divided(model, "CUDA", "nccl", "cuda_ipc", limit=LIMIT_SECONDS, kind=request.param)
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("backend", ["nccl", "cuda_ipc"])
def test_both_gpus_follow_the_weights(seen: dict[str, Any], backend: str) -> None:
    assert_follows(seen[backend])


def test_parameters_are_read_back(seen: dict[str, Any]) -> None:
    pushes = ("first", "new", "partial", "old", "new again")
    read_back = {backend: [found[push]["is_read_back"] for push in pushes] for backend, found in seen.items()}
    both, none = [True, True], [False, False]
    # Each complete push after a partial one is compared.
    assert read_back == {"nccl": [both, both, both, both, none], "cuda_ipc": [both, none, none, both, none]}


def test_each_gpu_gets_its_part_over_nccl(seen: dict[str, Any]) -> None:
    whole = seen["nccl"]["num_bytes"]
    assert seen["nccl"]["first"]["bytes"] == [whole] * 2
    assert all(0.5 * whole < number < 0.55 * whole for number in seen["nccl"]["new"]["bytes"])
    assert seen["cuda_ipc"]["new"]["bytes"] == [whole] * 2


@pytest.mark.parametrize("seen", [SLICES], indirect=True)
def test_parts_of_the_other_gpu_are_refused(seen: dict[str, Any]) -> None:
    assert "are not those of the trainer's weights" in seen["nccl"]["refusal"]
