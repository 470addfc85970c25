"""What each of an engine's two GPUs reads of the weights, and that it is found in its parameters afterwards.

vLLM's models, its loaders and its groups are real: two processes. The sizes are odd on purpose. GPUs divide each layer,
with each expert of a mixture or (`rollout.enableExpertParallel`) half of the experts for each, or they are stages
(`rollout.pipelineParallelSize`) with a layer each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_trainer.engines.weights.receipts import read_by_none
from tests.ports import server_port
from tests.unit.trainer.engines import test_engine_families
from tests.unit.trainer.engines.tiny_experts import NUM_EXPERTS, fill_biases

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
# vLLM's latent attention on the CPU takes these sizes.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
FAMILIES = {
    **test_engine_families.FAMILIES,
    "deepseek v3": ("deepseek_v3", {**test_engine_families.LATENT, **LATENT, "num_key_value_heads": 4}),
    # vLLM has no copies of key heads for this family.
    "gpt oss": ("gpt_oss", {**test_engine_families.GPT_OSS, "num_key_value_heads": 2, "intermediate_size": 128}),
}
MIXTURES = {f"{name} by experts": FAMILIES[name] for name in ("qwen3 moe", "mixtral", "deepseek v3", "gpt oss")}
STAGES = {
    f"{name} by layers": FAMILIES[name]
    for name in ("llama", "qwen2 tied", "qwen3 moe", "deepseek v3", "gpt oss", "phi3")
}
SLICES = {name: FAMILIES[name] for name in ("llama", "qwen2 tied", "qwen3 moe", "gpt oss", "phi3")}
MODELS = {**SLICES, **MIXTURES, **STAGES}
RELOADED = [*MIXTURES, "qwen3 moe by layers", "deepseek v3 by layers", "gpt oss", "gpt oss by layers"]
"""vLLM changes weights of their experts when it loads them. Experts of gpt-oss come fused, others one by one."""
FUSED = ("gpt oss", "gpt oss by experts")
"""Each rank reads a part of all fused experts."""
COPIED = [name for name in MODELS if not name.startswith("gpt oss")]
"""vLLM's own loader of gpt-oss changes weights that it gets, so that they are always reloaded."""
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return for each model what the two ranks have seen."""
    folder, port = tmp_path_factory.mktemp("divided"), server_port()
    for name, (family, settings) in MODELS.items():
        torch.manual_seed(7)
        config = AutoConfig.for_model(family, **{**SHAPE, **settings, "moe_intermediate_size": EXPERT})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        fill_biases(model)
        model.save_pretrained(folder / name)
    kinds = {**dict.fromkeys(SLICES, "slices"), **dict.fromkeys(MIXTURES, "experts"), **dict.fromkeys(STAGES, "stages")}
    given = [f"{kinds[name]}:{folder / name}" for name in MODELS]
    first, second = seen_by_both(folder, port, given)
    return {name: pair for name, *pair in zip(MODELS, first, second, strict=True)}


def seen_by_both(folder: Path, port: int, given: list[str]) -> list[list[Any]]:
    """Return what the two ranks have seen. A rank whose peer has failed would wait for it, so it is ended."""
    files, ranks = [folder / f"rank-{rank}.txt" for rank in range(2)], []
    for rank, file in enumerate(files):
        command = [sys.executable, "-m", "tests.unit.trainer.engines.divided_models", str(rank), str(port), *given]
        with file.open("w") as output:
            ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
    until = time.monotonic() + LIMIT_SECONDS
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes) and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    said = [file.read_text(encoding="utf-8") for file in files]
    assert codes == [0, 0], "\n".join(f"rank {rank}: {text[-8000:]}" for rank, text in enumerate(said))
    lines = [next(line for line in text.splitlines() if line.startswith("FOUND ")) for text in said]
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]


def halves(length: int, *others: int) -> list[Any]:
    """Return the boxes of each rank in a tensor whose first dim is divided."""
    rest = [[0, other] for other in others]
    return [[[[0, length // 2], *rest]], [[[length // 2, length], *rest]]]


def whole(*shape: int) -> list[Any]:
    return [[[[0, length] for length in shape]]] * 2


def only_of(rank: int, *shape: int) -> list[Any]:
    """Return the boxes of each rank in a tensor that one of them needs."""
    return [boxes if rank == number else [] for number, boxes in enumerate(whole(*shape))]


def is_of_another(model: str, name: str, rank: int) -> bool:
    """Whether a tensor is of an expert, or of a layer, that the other rank has: of the first half, or of the second."""
    if model in SLICES:
        return False
    if model in MIXTURES:
        found = re.search(r"\.experts\.(\d+)\.", name)
        return found is not None and int(found[1]) // (NUM_EXPERTS // 2) != rank
    if ".layers." not in name and model in ("qwen3 moe by layers", "gpt oss by layers"):
        # vLLM's Qwen3-MoE and gpt-oss have the embedding, the last norm and the output layer in each stage.
        return False
    if name == "model.embed_tokens.weight":
        return rank == 1 and "tied" not in model
    # The last of the two stages has the output layer and the norm before it.
    return f".layers.{rank}." not in name and not (rank == 1 and ".layers." not in name)


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
        # Three of the six experts on each rank; attention and shared experts as without.
        ("qwen3 moe by experts", f"{LAYER}.mlp.experts.2.down_proj.weight", only_of(0, HIDDEN, EXPERT)),
        ("qwen3 moe by experts", f"{LAYER}.mlp.experts.3.gate_proj.weight", only_of(1, EXPERT, HIDDEN)),
        ("qwen3 moe by experts", f"{LAYER}.mlp.gate.weight", whole(6, HIDDEN)),
        ("qwen3 moe by experts", f"{LAYER}.self_attn.q_proj.weight", halves(4 * HEAD, HIDDEN)),
        ("mixtral by experts", f"{LAYER}.block_sparse_moe.experts.2.w1.weight", only_of(0, INTERMEDIATE, HIDDEN)),
        ("mixtral by experts", f"{LAYER}.block_sparse_moe.experts.3.w2.weight", only_of(1, HIDDEN, INTERMEDIATE)),
        ("deepseek v3 by experts", f"{LAYER}.mlp.experts.2.up_proj.weight", only_of(0, EXPERT, HIDDEN)),
        ("deepseek v3 by experts", f"{LAYER}.mlp.experts.5.down_proj.weight", only_of(1, HIDDEN, EXPERT)),
        ("deepseek v3 by experts", f"{LAYER}.mlp.shared_experts.up_proj.weight", halves(2 * EXPERT, HIDDEN)),
        ("deepseek v3 by experts", f"{LAYER}.mlp.gate.e_score_correction_bias", whole(6)),
        ("llama by layers", "model.embed_tokens.weight", only_of(0, VOCABULARY, HIDDEN)),
        ("llama by layers", "lm_head.weight", only_of(1, VOCABULARY, HIDDEN)),
        ("qwen2 tied by layers", "model.embed_tokens.weight", whole(VOCABULARY, HIDDEN)),
        ("qwen3 moe by layers", f"{LAYER}.mlp.experts.2.up_proj.weight", only_of(1, EXPERT, HIDDEN)),
    ],
)
def test_each_rank_reads_its_own_boxes(found: Found, model: str, name: str, expected: list[Any]) -> None:
    assert [rank["boxes"][name] for rank in found[model]] == expected


@pytest.mark.parametrize("model", MODELS)
def test_every_weight_is_read_in_boxes(found: Found, model: str) -> None:
    for number, rank in enumerate(found[model]):
        assert rank["are_exact"]
        unread = [name for name, boxes in rank["boxes"].items() if not boxes]
        assert unread == [name for name in rank["boxes"] if is_of_another(model, name, number)]


@pytest.mark.parametrize("model", MODELS)
def test_boxes_alone_give_the_same_parameters(found: Found, model: str) -> None:
    assert [rank["from_boxes"] for rank in found[model]] == [True, True]


@pytest.mark.parametrize("model", COPIED)
def test_the_parameters_of_a_rank_are_read_back(found: Found, model: str) -> None:
    assert [rank["others"] for rank in found[model]] == [True, True]


@pytest.mark.parametrize("model", COPIED)
def test_after_a_partial_push_all_parameters_of_a_rank_are_read_back(found: Found, model: str) -> None:
    for rank in found[model]:
        assert rank["partial"] is True
        assert rank["partial without a complete one"] is False, "there is nothing to compare the rest with"


@pytest.mark.parametrize("model", COPIED)
@pytest.mark.parametrize("fault", ["stale", "stale in a partial one", "changed"])
def test_a_rank_with_other_parameters_is_reported(found: Found, model: str, fault: str) -> None:
    # What is stale is in the first layer.
    has_fault = found[model][:1] if model in STAGES and fault != "changed" else found[model]
    assert all(rank[fault] is True for rank in found[model] if rank not in has_fault)
    for rank in has_fault:
        assert "vLLM's parameters are not version 7 of the weights" in rank[fault]


@pytest.mark.parametrize("model", [name for name in (*MIXTURES, *STAGES) if name not in FUSED])
def test_each_rank_reports_what_it_did_not_read_and_together_they_read_all(found: Found, model: str) -> None:
    unread = [rank["unread"] for rank in found[model]]
    assert all(unread)
    assert unread == [[name for name, boxes in rank["boxes"].items() if not boxes] for rank in found[model]]
    assert read_by_none(unread) == []


@pytest.mark.parametrize("model", RELOADED)
@pytest.mark.parametrize("push", ["whole", "boxes"])
def test_a_reload_leaves_a_rank_what_it_reads_from_disk(found: Found, model: str, push: str) -> None:
    for rank in found[model]:
        assert rank["reloaded"][push] == []
    # Otherwise the comparison would say nothing. The first layer of DeepSeek-V3 has no experts.
    changed = [
        any(name.endswith("experts.w13_weight") for name in rank["reloaded"]["negated"]) for rank in found[model]
    ]
    assert changed == [model != "deepseek v3 by layers", True]


@pytest.mark.parametrize("model", RELOADED)
def test_reloaded_weights_of_a_rank_are_read_back_as_on_a_gpu(found: Found, model: str) -> None:
    assert [rank["compared"] for rank in found[model]] == [[True, True], [True, True]]


@pytest.mark.parametrize("model", RELOADED)
def test_the_rank_that_lacks_a_matrix_of_its_expert_refuses_the_push(found: Found, model: str) -> None:
    first, second = found[model]
    if model in FUSED:
        assert "layers without all of their weights: " in first["reloaded"]["too few"]
    else:
        assert (first["too few"], first["reloaded"]["too few"]) == (True, [])
    assert "vLLM's parameters are not version 7 of the weights" in second["too few"]
    assert re.search(r"layers without all of their weights: .*1\.\w+\.experts", second["reloaded"]["too few"])
