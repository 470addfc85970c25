"""What each GPU of a tensor-parallel engine reads of the weights, and that it is found in its parameters afterwards.

vLLM's models, its loaders and its groups are real: two processes. The sizes are odd on purpose.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.ports import server_port
from tests.unit.trainer.engines import test_engine_families

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_SECONDS = 540
VOCABULARY, HIDDEN, INTERMEDIATE, EXPERT, HEAD = 131, 64, 96, 24, 32
# 131 tokens are padded to 192, so the first rank has 96 and the second 35. One KV head is on both.
SHAPE: dict[str, Any] = {
    **test_engine_families.SHAPE,
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": EXPERT,
    "head_dim": HEAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
MODELS = {name: test_engine_families.FAMILIES[name] for name in ("llama", "qwen2 tied", "qwen3 moe", "phi3")}
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return for each model what the two ranks have seen."""
    folder, port = tmp_path_factory.mktemp("divided"), server_port()
    for name, (family, settings) in MODELS.items():
        torch.manual_seed(7)
        config = AutoConfig.for_model(family, **{**SHAPE, **settings, "moe_intermediate_size": EXPERT})
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
    paths = [str(folder / name) for name in MODELS]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: seen_by(rank, port, paths), range(2))
    return {Path(path).name: pair for path, *pair in zip(paths, first, second, strict=True)}


def seen_by(rank: int, port: int, paths: list[str]) -> list[Any]:
    command = [sys.executable, "-m", "tests.unit.trainer.engines.divided_models", str(rank), str(port), *paths]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-8000:]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("FOUND "))
    seen: list[Any] = json.loads(line.removeprefix("FOUND "))
    return seen


def halves(length: int, *others: int) -> list[Any]:
    """Return the boxes of each rank in a tensor whose first dim is divided."""
    rest = [[0, other] for other in others]
    return [[[[0, length // 2], *rest]], [[[length // 2, length], *rest]]]


def whole(*shape: int) -> list[Any]:
    return [[[[0, length] for length in shape]]] * 2


# Half of the query's 128 rows, and all rows of the one key and the one value, which follow them.
OF_FUSED = [[[[0, 64], [0, HIDDEN]], [[128, 192], [0, HIDDEN]]], [[[64, 192], [0, HIDDEN]]]]
LAYER = "model.layers.1"
OF_VOCABULARY = [[[[0, 96], [0, HIDDEN]]], [[[96, VOCABULARY], [0, HIDDEN]]]]
OF_INPUTS = [[[[0, HIDDEN], [0, INTERMEDIATE // 2]]], [[[0, HIDDEN], [INTERMEDIATE // 2, INTERMEDIATE]]]]
OF_EXPERTS = [
    [[[0, 6], [start, start + EXPERT // 2], [0, HIDDEN]] for start in (rank * EXPERT // 2, EXPERT + rank * EXPERT // 2)]
    for rank in range(2)
]


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("llama", "model.embed_tokens.weight", OF_VOCABULARY),
        ("llama", "lm_head.weight", OF_VOCABULARY),
        ("llama", f"{LAYER}.self_attn.q_proj.weight", halves(4 * HEAD, HIDDEN)),
        ("llama", f"{LAYER}.self_attn.k_proj.weight", whole(HEAD, HIDDEN)),
        ("llama", f"{LAYER}.mlp.up_proj.weight", halves(INTERMEDIATE, HIDDEN)),
        ("llama", f"{LAYER}.mlp.down_proj.weight", OF_INPUTS),
        ("llama", f"{LAYER}.input_layernorm.weight", whole(HIDDEN)),
        # Its heads have a quarter of the hidden numbers.
        ("qwen2 tied", "model.embed_tokens.weight", OF_VOCABULARY),
        ("qwen2 tied", f"{LAYER}.self_attn.q_proj.bias", halves(HIDDEN)),
        ("qwen2 tied", f"{LAYER}.self_attn.v_proj.bias", whole(HIDDEN // 4)),
        ("qwen3 moe", f"{LAYER}.mlp.experts.gate_up_proj", OF_EXPERTS),
        ("qwen3 moe", f"{LAYER}.mlp.gate.weight", whole(6, HIDDEN)),
        ("phi3", f"{LAYER}.self_attn.qkv_proj.weight", OF_FUSED),
    ],
)
def test_each_rank_reads_its_own_boxes(found: Found, model: str, name: str, expected: list[Any]) -> None:
    assert [rank["boxes"][name] for rank in found[model]] == expected


@pytest.mark.parametrize("model", MODELS)
def test_every_weight_is_read_in_boxes(found: Found, model: str) -> None:
    for rank in found[model]:
        assert rank["are_exact"]
        assert all(rank["boxes"].values())


@pytest.mark.parametrize("model", MODELS)
def test_boxes_alone_give_the_same_parameters(found: Found, model: str) -> None:
    assert [rank["from_boxes"] for rank in found[model]] == [True, True]


@pytest.mark.parametrize("model", MODELS)
def test_the_parameters_of_a_rank_are_read_back(found: Found, model: str) -> None:
    assert [rank["others"] for rank in found[model]] == [True, True]


@pytest.mark.parametrize("model", MODELS)
def test_after_a_partial_push_all_parameters_of_a_rank_are_read_back(found: Found, model: str) -> None:
    for rank in found[model]:
        assert rank["partial"] is True
        assert rank["partial without a complete one"] is False, "there is nothing to compare the rest with"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fault", ["stale", "stale in a partial one", "changed"])
def test_a_rank_with_other_parameters_is_reported(found: Found, model: str, fault: str) -> None:
    for rank in found[model]:
        assert "vLLM's parameters are not version 7 of the weights" in rank[fault]
