"""Adapters and options of memory on divided layers: the same numbers and files as on one rank without the options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ppojob_api.v1alpha1.model import LoRA, Offload
from ppojob_trainer.engines.train.dims import PIPELINE, ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines import option_ranks, peer_ranks
from tests.unit.trainer.engines.test_engine_families import FAMILIES, SHAPE
from tests.unit.trainer.engines.test_engine_peers import UNTIED, models, run_ranks
from tests.unit.trainer.engines.tiny_experts import save_starved_experts, save_tiny_experts, saved, tiny_experts
from tests.unit.trainer.engines.tiny_llama import assert_same_updates, save_tiny_model

__all__ = ["models"]

pytestmark = pytest.mark.slow

Results = dict[str, Any]
ROLES = ("actor", "critic")
EMBEDDING, COPY = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
SAME_GRADIENTS = (1e-3, 1e-2)
"""How far the gradients of the two steps may be apart, as a share of the largest entry. Orders of the sums differ by up
to 3e-4, on processors with AVX-512 and in the queries behind a norm, whose gradients are differences of nearly equal
numbers; a rank's part that is left out or added twice makes more than 0.1. The second step begins from the weights of
the first, whose AdamW has moved numbers with a gradient of next to nothing apart."""
BOTH = Offload(parameters=True, optimizer=True)
# The ranks do not divide the rank of the adapters.
ALL_LAYERS = LoRA(rank=3, alpha=12.0)
# Divided by outputs, with a bias in qwen2; divided by inputs.
TWO_LAYERS = LoRA(rank=4, alpha=2.0, target_modules=["k_proj", "down_proj"])
OF_ATTENTION = LoRA(rank=3, alpha=12.0, target_modules=["q_proj", "o_proj"])


@dataclass(frozen=True)
class Layout:
    """How many ranks train which model. options: settings that change no number."""

    dims: ParallelDims
    family: str
    lora: LoRA | None = ALL_LAYERS
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> dict[str, Any]:
        return {"lora": self.lora}


OF_EXPERTS = {"experts", "two experts", "starved", "mixtral", "deepseek", "gpt_oss"}
LAYOUTS = {
    "tensor 2 of gemma2": Layout(ParallelDims(tensor=2), "gemma2"),
    "tensor 2 of qwen3, all offloaded": Layout(
        ParallelDims(tensor=2), "qwen3", options={"offload": BOTH, "activation_offload": True}
    ),
    "shard 2 x tensor 2, gathered": Layout(ParallelDims(shard=2, tensor=2), "qwen2", options={"stays_gathered": True}),
    "sequence 2 x tensor 2": Layout(ParallelDims(sequence=2, tensor=2), "many heads"),
    "replicate 2 x tensor 2": Layout(ParallelDims(replicate=2, tensor=2), "llama", TWO_LAYERS),
    "pipeline 2, all weights, all offloaded": Layout(
        ParallelDims(pipeline=2), "llama", None, {"offload": BOTH, "activation_offload": True}
    ),
    "pipeline 2 x shard 2 of two stages each, adapters, gathered": Layout(
        ParallelDims(shard=2, pipeline=2, virtual=2), "deep", options={"stays_gathered": True}
    ),
    "pipeline 2 x tensor 2": Layout(ParallelDims(tensor=2, pipeline=2), "qwen3", TWO_LAYERS),
    "expert 2, one without tokens": Layout(ParallelDims(shard=2, expert=2), "starved", None),
    "expert 2, adapters, gathered": Layout(
        ParallelDims(shard=2, expert=2), "experts", OF_ATTENTION, {"stays_gathered": True}
    ),
    "pipeline 2 x expert 2 of sequence 2, deepseek": Layout(
        ParallelDims(sequence=2, pipeline=2, expert=2), "deepseek", None
    ),
    "expert 2 x replicate 2": Layout(ParallelDims(replicate=2, shard=2, expert=2), "experts", None),
}
LONG = {
    # torch traces a layer of experts for minutes.
    "expert 2, adapters, gathered, compiled": Layout(
        ParallelDims(shard=2, expert=2), "experts", OF_ATTENTION, {"stays_gathered": True, "compile": True}
    ),
    "tensor 2, all weights, compiled": Layout(ParallelDims(tensor=2), "llama", None, {"compile": True}),
    "tensor 2": Layout(ParallelDims(tensor=2), "llama"),
    "tensor 2 of layers with biases": Layout(ParallelDims(tensor=2), "biases"),
    "tensor 2 of gemma": Layout(ParallelDims(tensor=2), "gemma"),
    "tensor 2 of gemma3": Layout(ParallelDims(tensor=2), "gemma3_text"),
    "tensor 2 of mistral": Layout(ParallelDims(tensor=2), "mistral"),
    "tensor 2 of smollm3": Layout(ParallelDims(tensor=2), "smollm3"),
    "tensor 2 of two layers of qwen2": Layout(ParallelDims(tensor=2), "qwen2", TWO_LAYERS),
    "tensor 2, nothing recomputed": Layout(
        ParallelDims(tensor=2), "llama", TWO_LAYERS, {"gradient_checkpointing": False}
    ),
    "shard 2 x tensor 2": Layout(ParallelDims(shard=2, tensor=2), "llama"),
    "tensor 2, all weights, activations offloaded": Layout(
        ParallelDims(tensor=2), "qwen2", None, {"activation_offload": True}
    ),
    "shard 2 x tensor 2, all weights, all offloaded": Layout(
        ParallelDims(shard=2, tensor=2), "llama", None, {"offload": BOTH, "activation_offload": True}
    ),
    "pipeline 3 of five layers": Layout(ParallelDims(pipeline=3), "deep", None),
    "pipeline 2 x shard 2, tied, gathered": Layout(
        ParallelDims(shard=2, pipeline=2), "llama", None, {"stays_gathered": True, "gradient_checkpointing": False}
    ),
    "pipeline 2 of two stages each": Layout(ParallelDims(pipeline=2, virtual=2), "deep", None),
    "expert 2 of 4 ranks": Layout(ParallelDims(shard=4, expert=2), "experts", None, {"gradient_checkpointing": False}),
    "expert 2 of sequence 2, all offloaded": Layout(
        ParallelDims(sequence=2, expert=2), "experts", None, {"offload": BOTH, "activation_offload": True}
    ),
    "pipeline 2 x expert 2": Layout(ParallelDims(shard=2, pipeline=2, expert=2), "experts", None),
    "pipeline 2 x shard 2, adapters, gathered": Layout(
        ParallelDims(shard=2, pipeline=2), "qwen2", options={"stays_gathered": True}
    ),
    "shard 2 x sequence 2 x tensor 2": Layout(ParallelDims(1, 2, 2, 2), "many heads"),
    "replicate 2 x shard 2 x tensor 2": Layout(ParallelDims(2, 2, 1, 2), "qwen2", options={"activation_offload": True}),
    "all axes but the pipeline": Layout(ParallelDims(2, 2, 2, 2), "many heads"),
    "expert 4 of shard 2 x sequence 2": Layout(ParallelDims(shard=2, sequence=2, expert=4), "starved", None),
    "expert 2 of replicate 2 x shard 2 x sequence 2": Layout(ParallelDims(2, 2, 2, expert=2), "experts", None),
    "expert 2 of 4 ranks with 2 experts": Layout(ParallelDims(shard=4, expert=2), "two experts", None),
    "expert 2 of deepseek, adapters": Layout(
        ParallelDims(shard=2, expert=2),
        "deepseek",
        LoRA(rank=3, alpha=12.0, target_modules=["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]),
        {"compile": True},
    ),
    "expert 2 of mixtral": Layout(
        ParallelDims(shard=2, expert=2), "mixtral", None, {"compile": True, "gradient_checkpointing": False}
    ),
    "pipeline 2 of experts": Layout(ParallelDims(pipeline=2), "experts", None),
    "pipeline 2 x shard 2 of experts, gathered": Layout(
        ParallelDims(shard=2, pipeline=2), "experts", None, {"stays_gathered": True}
    ),
    # One stage has a dense layer alone, and another experts without tokens.
    "pipeline 3 x expert 2, all offloaded": Layout(
        ParallelDims(shard=2, pipeline=3, expert=2), "starved", None, {"offload": BOTH, "activation_offload": True}
    ),
    "pipeline 2 x expert 2, adapters, gathered": Layout(
        ParallelDims(shard=2, pipeline=2, expert=2), "experts", OF_ATTENTION, {"stays_gathered": True}
    ),
    "pipeline 2 x expert 2 of replicate 2 x shard 2": Layout(
        ParallelDims(replicate=2, shard=2, pipeline=2, expert=2), "experts", None
    ),
    "pipeline 2 x expert 2 of sequence 2": Layout(ParallelDims(sequence=2, pipeline=2, expert=2), "experts", None),
    "pipeline 2 of two stages each, compiled": Layout(
        ParallelDims(pipeline=2, virtual=2), "deep", None, {"compile": True}
    ),
    # Rounds of three micro-batches.
    "pipeline 3 of two stages each": Layout(ParallelDims(pipeline=3, virtual=2), "deeper", None),
    "pipeline 2 x shard 2 of two stages each, all offloaded": Layout(
        ParallelDims(shard=2, pipeline=2, virtual=2), "deep", None, {"offload": BOTH, "activation_offload": True}
    ),
    "pipeline 2 x shard 2 of two stages each, tied, gathered": Layout(
        ParallelDims(shard=2, pipeline=2, virtual=2),
        "deep",
        None,
        {"stays_gathered": True, "gradient_checkpointing": False},
    ),
    "pipeline 2 x tensor 2 of three stages each": Layout(
        ParallelDims(tensor=2, pipeline=2, virtual=3), "deeper", TWO_LAYERS
    ),
    "pipeline 2 x sequence 2 of two stages each": Layout(ParallelDims(sequence=2, pipeline=2, virtual=2), "deep", None),
    "pipeline 2 x replicate 2 of two stages each": Layout(
        ParallelDims(replicate=2, pipeline=2, virtual=2), "deep", None
    ),
    "pipeline 2 x expert 2 of two stages each": Layout(
        ParallelDims(shard=2, pipeline=2, expert=2, virtual=2), "deep experts", None
    ),
    "expert 2 of shard 4, gathered": Layout(ParallelDims(shard=4, expert=2), "experts", None, {"stays_gathered": True}),
}


@dataclass(frozen=True)
class Seen:
    """What the ranks of a layout wrote, and what one rank computes without options."""

    layout: Layout
    model: Path
    folder: Path
    ranks: list[Results]
    written: list[list[str]]
    folder_of_one: Path
    of_one: Results

    @property
    def first(self) -> Results:
        """Rank 0's results."""
        return self.ranks[0]


@pytest.fixture(scope="module")
def all_models(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("biases")
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**UNTIED, attention_bias=True, mlp_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            # A bias begins at 0, where adding it twice would not show.
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    deep = save_tiny_model(folder / "deep", num_hidden_layers=5)
    deeper = save_tiny_model(folder / "deeper", num_hidden_layers=7, tie_word_embeddings=False)
    others = {family: folder / family for family in ("gemma", "gemma2", "gemma3_text", "mistral", "smollm3")}
    for family, settings in FAMILIES.values():
        if family in others:
            config = AutoConfig.for_model(family, **{**SHAPE, **settings})
            AutoModelForCausalLM.from_config(config).save_pretrained(others[family])
    return {
        **models,
        **others,
        "biases": folder,
        "many heads": save_tiny_model(folder / "many heads", num_attention_heads=8, num_key_value_heads=4),
        "deep": deep,
        "deeper": deeper,
        "deep experts": saved(tiny_experts(num_hidden_layers=5), folder / "deep experts"),
        "starved": save_starved_experts(folder / "starved"),
        "deepseek": save_tiny_experts(folder / "deepseek", family="deepseek_v3"),
        **{family: save_tiny_experts(folder / family, family=family) for family in ("mixtral", "gpt_oss")},
        "two experts": saved(tiny_experts(num_experts=2), folder / "two"),
    }


@pytest.fixture(scope="module")
def alone(
    parallel: ParallelMesh, all_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Results]]:
    @functools.cache
    def compute(family: str, lora: str) -> tuple[Path, Results]:
        settings = {"lora": None if lora == "" else LoRA.model_validate_json(lora)}
        folder, batch = tmp_path_factory.mktemp("one"), peer_ranks.whole_batch()
        return folder, option_ranks.run(parallel, all_models[family], batch, folder, settings=settings)

    return compute


def seen_of(layouts: dict[str, Layout], long: dict[str, Layout]) -> Any:
    """Return the fixture `seen` of a module: what ranks and one rank compute in each of its layouts."""

    @pytest.fixture(scope="module", params=[*layouts, *(pytest.param(name, marks=pytest.mark.long) for name in long)])
    def seen(
        request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory,
        all_models: dict[str, Path],
        alone: Callable[[str, str], tuple[Path, Results]],
    ) -> Seen:
        layout = (layouts | long)[request.param]
        return see(layout, all_models[layout.family], tmp_path_factory.mktemp("peers"), alone)

    return seen


seen = seen_of(LAYOUTS, LONG)


def see(layout: Layout, model: Path, folder: Path, alone: Callable[[str, str], tuple[Path, Results]]) -> Seen:
    work = functools.partial(option_ranks.run, settings=layout.plain | layout.options)
    run_ranks(layout.dims, model, folder, work)
    of_ranks = read_ranks(layout.dims, folder)
    written = [mine["written"] for mine in of_ranks]
    lora = "" if layout.lora is None else layout.lora.model_dump_json(by_alias=True)
    folder_of_one, of_one = alone(layout.family, lora)
    ranks = whole_models(layout.dims, of_ranks, of_one)
    return Seen(layout, model, folder, ranks, written, folder_of_one, of_one)


def read_ranks(dims: ParallelDims, folder: Path) -> list[Results]:
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(dims.world_size)]


def whole_models(dims: ParallelDims, ranks: list[Results], of_one: Results) -> list[Results]:
    """Put together the tensors of the stages of each pipeline; without pipelines return those of the ranks."""
    tensors = [{name: value for name, value in mine.items() if name != "written"} for mine in ranks]
    is_tied = COPY not in of_one["trained"]
    return [merged([tensors[one] for one in group], is_tied) for group in dims.groups(PIPELINE) for _ in group]


def merged(stages: list[Results], is_tied: bool) -> Results:
    """Return the union of dictionaries of tensors; everything else is equal on all stages."""
    found: Results = {}
    for name in dict.fromkeys(name for stage in stages for name in stage):
        each = [stage[name] for stage in stages if name in stage]
        if isinstance(each[0], dict):
            found[name] = merged(each, is_tied)
        elif isinstance(each[0], list):
            found[name] = [merged(list(one), is_tied) for one in zip(*each, strict=True)]
        else:
            torch.testing.assert_close(each, each[:1] * len(each), atol=0, rtol=0)
            found[name] = each[0]
    if is_tied and len(stages) > 1 and EMBEDDING in found and COPY in found:
        # Stage 0 and the last stage have the embedding.
        torch.testing.assert_close(found.pop(COPY), found[EMBEDDING], atol=0, rtol=0)
    return found


def comparable(layout: Layout, metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that the layout does not change: experts count the tokens that fill up sequence-parallel slices."""
    is_filled = layout.dims.slices > 1
    return {name: value for name, value in metrics.items() if not (is_filled and "expert_imbalance" in name)}


def files(export: Path) -> dict[str, bytes]:
    """The weights of an export, adapters and index included."""
    return {str(file.relative_to(export)): file.read_bytes() for file in export.rglob("*.safetensors*")}


def test_the_initial_values_are_those_of_one_rank(seen: Seen) -> None:
    for mine in seen.ranks:
        torch.testing.assert_close(mine["initial"], seen.of_one["initial"], atol=0, rtol=0)


@pytest.mark.parametrize("key", ["log_probs", "reference", "values"])
def test_the_outputs_are_those_of_one_rank(seen: Seen, key: str) -> None:
    dims = seen.layout.dims
    for number, mine in enumerate(seen.ranks):
        rows = peer_ranks.rows_of(number // dims.pipeline // dims.model_parallel, dims.num_shards)
        torch.testing.assert_close(mine[key], seen.of_one[key][rows], atol=1e-5, rtol=1e-4)
    if seen.layout.lora is not None:
        assert (seen.of_one["log_probs"] - seen.of_one["reference"]).abs().max() > 0.01


@pytest.mark.parametrize("role", ROLES)
def test_two_optimizer_steps_are_those_of_one_rank(seen: Seen, role: str) -> None:
    expected = seen.of_one[role]
    for mine in seen.ranks:
        found = mine[role]
        metrics, of_one = (comparable(seen.layout, one["metrics"]) for one in (found, expected))
        assert metrics == pytest.approx(of_one, rel=1e-4, abs=1e-5)
        assert len(found["gradients"]) == 2
        for step, gradients in enumerate(expected["gradients"]):
            assert found["gradients"][step].keys() == gradients.keys()
            for name, gradient in gradients.items():
                scale = gradient.abs().max()
                assert scale > 0, f"{name} has no gradient"
                apart = (found["gradients"][step][name] - gradient).abs().max() / scale
                assert apart < SAME_GRADIENTS[step], f"{name}: {apart:g} of the gradient of step {step}"
        assert_same_updates(found["after"], expected["after"], expected["before"])


def test_layers_are_compiled_where_the_job_says_so(seen: Seen) -> None:
    is_compiled, dims = "compile" in seen.layout.options, seen.layout.dims
    # With dense layers, which are compiled as a whole.
    has_parts = is_compiled and seen.layout.family in OF_EXPERTS and max(dims.tensor, dims.expert) > 1
    for mine in seen.ranks:
        assert mine["compilation"]["is_compiled"] == is_compiled
        assert mine["compilation"]["refused"] == 0
        assert (mine["compilation"]["parts"] > 0) == has_parts


def test_ranks_of_a_group_stay_equal(seen: Seen) -> None:
    for mine in seen.ranks:
        for key in ("trained", "sent"):
            torch.testing.assert_close(mine[key], seen.first[key], atol=0, rtol=0)


def test_a_partial_push_gathers_the_modules_with_adapters(seen: Seen) -> None:
    lora = seen.layout.lora
    for mine in seen.ranks:
        expected = {name: mine["sent"][name] for name in seen.of_one["changing"]}
        torch.testing.assert_close(mine["changing"], expected, atol=0, rtol=0)
        assert (len(mine["changing"]) < len(mine["sent"])) == (lora is not None)
        if lora == OF_ATTENTION:
            assert all(".self_attn." in name for name in mine["changing"])


def test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes(
    seen: Seen, parallel: ParallelMesh, tmp_path: Path
) -> None:
    (seen.folder / "checkpoint").rename(tmp_path / "saved")
    batch = peer_ranks.whole_batch()
    found = option_ranks.resume(parallel, seen.model, batch, tmp_path, settings=seen.layout.plain)
    for key in ("trained", "sent"):
        torch.testing.assert_close(found[key], seen.first[key], atol=0, rtol=0)
    assert files(tmp_path / "export") == files(seen.folder / "export")
    second, expected = (comparable(seen.layout, one["second"]) for one in (found, seen.first))
    assert second == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes(seen: Seen, tmp_path: Path) -> None:
    (tmp_path / "saved").symlink_to(seen.folder_of_one / "checkpoint")
    work = functools.partial(option_ranks.resume, settings=seen.layout.plain | seen.layout.options)
    run_ranks(seen.layout.dims, seen.model, tmp_path, work)
    for found in whole_models(seen.layout.dims, read_ranks(seen.layout.dims, tmp_path), seen.of_one):
        for key in ("trained", "sent"):
            torch.testing.assert_close(found[key], seen.of_one[key], atol=0, rtol=0)
        second, expected = (comparable(seen.layout, one["second"]) for one in (found, seen.of_one))
        assert second == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert files(tmp_path / "export") == files(seen.folder_of_one / "export")
    assert ("adapter/adapter_model.safetensors" in files(tmp_path / "export")) == (seen.layout.lora is not None)


def test_each_rank_writes_its_share_of_the_files(seen: Seen) -> None:
    per_rank = seen.written
    written = [name for mine in per_rank for name in mine]
    assert len(written) == len(seen.of_one["written"]) > 4
    assert sorted(written) == sorted(seen.of_one["written"])
    assert max(map(len, per_rank)) - min(map(len, per_rank)) <= 1
