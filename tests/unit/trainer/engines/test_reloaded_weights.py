"""What the trainer pushes is what vLLM's own model has then, for each family; a push that leaves something out fails.

vLLM's model, its loaders and its layouts are real; only the engine around them is not there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_trainer.models.support import FAMILIES, Support
from tests.unit.trainer.engines import test_engine_families
from tests.unit.trainer.engines.tiny_experts import fill_biases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_SECONDS = 800
# vLLM computes attention of 32 numbers or more for each head.
SHAPE: dict[str, Any] = {
    **test_engine_families.SHAPE,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
# vLLM's latent attention on the CPU takes these sizes of the latent vector and of the rotated part alone.
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
}
# They have the same tensors as another variant. Of the last one, vLLM refuses the windows.
LEFT_OUT = (
    "llama 3 rope",
    "mistral window",
    "mixtral window",
    "deepseek v3 with yarn and whole queries",
    "gpt oss with long windows",
    "qwen2 windows above layer 1",
)
VARIANTS = {
    name: pair
    for name, pair in test_engine_families.FAMILIES.items()
    if FAMILIES[pair[0]].push is Support.TESTED and name not in LEFT_OUT
}
# The pushes of all weights, the last two after pushes that broke off.
WHOLE = ("all", "all again", "all after a broken one", "all at last", "all after a partial one")
# Pushes that bring some layers. The second one brings back what the first one has changed.
PARTIAL = ("attention alone", "attention again")
WITH_EXPERTS = [name for name, (_, settings) in VARIANTS.items() if "num_experts_per_tok" in settings]


def found_by(module: str, folder: Path, variants: Collection[str]) -> dict[str, Any]:
    """Write models of variants, let a module of this folder push to them, and return what it prints of each one."""
    paths = [str(folder / name) for name in variants]
    for name in variants:
        family, settings = VARIANTS[name]
        torch.manual_seed(7)
        sizes = LATENT if family == "deepseek_v3" else {}
        config = AutoConfig.for_model(family, **{**SHAPE, **settings, **sizes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        fill_biases(model)
        model.save_pretrained(folder / name)
    command = [sys.executable, "-m", f"tests.unit.trainer.engines.{module}", *paths]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-8000:]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("FOUND "))
    return {Path(path).name: found for path, found in json.loads(line.removeprefix("FOUND ")).items()}


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return for each variant and each push what the check said, and the parameters that differ from those on disk."""
    return found_by("reloaded_weights", tmp_path_factory.mktemp("reloaded"), VARIANTS)


def attention_of(variant: str) -> str:
    """Return the part of the names of vLLM's layers of attention."""
    return ".attn." if variant == "gpt oss" else ".self_attn."


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_push_leaves_what_vllm_reads_from_disk(reloaded: dict[str, Any], variant: str) -> None:
    for push in WHOLE:
        assert (reloaded[variant][push]["says"], reloaded[variant][push]["changed"]) == ("passed", []), push
    # Otherwise the comparison would say nothing.
    others = reloaded[variant]["others"]
    assert others["says"] == "passed"
    assert others["changed"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_partial_push_changes_the_layers_that_it_brings_and_no_others(reloaded: dict[str, Any], variant: str) -> None:
    alone, again = (reloaded[variant][push] for push in PARTIAL)
    assert (alone["says"], again["says"], again["changed"]) == ("passed", "passed", [])
    # Their weights came with the other sign.
    assert alone["signs"] == {name: -1 if attention_of(variant) in name else 1 for name in again["signs"]}
    assert set(again["signs"].values()) == {1}
    assert all(attention_of(variant) in name for name in alone["changed"])


# Checkpoints of phi3 have fused layers themselves.
@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family != "phi3"])
def test_a_partial_push_with_a_part_of_a_fused_layer_fails(reloaded: dict[str, Any], variant: str) -> None:
    says = reloaded[variant]["queries alone"]["says"]
    first = rf"model\.layers\.0{re.escape(attention_of(variant))}(qkv|fused_qkv_a)_proj"
    assert re.search(f"without all of their weights: {first}", says)


@pytest.mark.parametrize("variant", WITH_EXPERTS)
@pytest.mark.parametrize("push", [*WHOLE, *PARTIAL, "others"])
def test_after_a_push_vllms_experts_compute_what_transformers_computes(
    reloaded: dict[str, Any], variant: str, push: str
) -> None:
    # Both in float32; experts in the wrong layout are apart by about 1.
    assert reloaded[variant][push]["apart"] < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("push", [*WHOLE, *PARTIAL, "others"])
def test_after_a_push_the_head_has_the_pushed_weights(reloaded: dict[str, Any], variant: str, push: str) -> None:
    # A tied head on the CPU has a packed copy of the embedding.
    assert reloaded[variant][push]["head_apart"] < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_push_that_leaves_something_out_fails(reloaded: dict[str, Any], variant: str) -> None:
    found = {push: outcome["says"] for push, outcome in reloaded[variant].items()}
    assert "does not hold version 7 of the weights" in found["nothing"]
    embedding = "model.embedding" if variant == "gpt oss" else "model.embed_tokens"
    assert f"took 0 of 0 numbers; layers without all of their weights: {embedding}, " in found["nothing"]
    first = f"model.layers.0{attention_of(variant)}o_proj, model.layers.1"
    assert f"without all of their weights: {first}" in found["no attention"]
    assert found["a name too many"] != "passed"
    assert found["broken off"] == "broken off"


@pytest.mark.parametrize("variant", WITH_EXPERTS)
@pytest.mark.parametrize("push", ["no experts", "half of the experts"])
def test_a_push_without_experts_fails(reloaded: dict[str, Any], variant: str, push: str) -> None:
    says = reloaded[variant][push]["says"]
    assert re.search(r"without all of their weights: model\.layers\.\d\.(mlp|block_sparse_moe)\.experts", says)


@pytest.mark.parametrize(
    ("variant", "layer"),
    [("deepseek v3", "model.layers.1.mlp"), ("gpt oss", "model.layers.0.attn.sinks, model.layers.1.attn.sinks")],
)
def test_a_push_without_what_vllm_does_not_count_fails(reloaded: dict[str, Any], variant: str, layer: str) -> None:
    """The biases of routers, and sinks."""
    says = reloaded[variant]["nothing uncounted"]["says"]
    assert f"without all of their weights: {layer}" in says
    assert any(name in says for name in ("e_score_correction_bias", "sinks"))
    assert reloaded["mixtral"]["nothing uncounted"]["says"] == "passed"


@pytest.mark.parametrize("variant", [name for name in WITH_EXPERTS if VARIANTS[name][0] == "qwen3_moe"])
def test_a_name_that_the_loader_of_a_mixture_ignores_fails(reloaded: dict[str, Any], variant: str) -> None:
    says = reloaded[variant]["a name too many"]["says"]
    taken, came = (int(word) for word in says.split(" took ")[1].split(" numbers")[0].split(" of "))
    assert came - taken == 3
