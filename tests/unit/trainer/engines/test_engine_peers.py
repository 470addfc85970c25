"""Divided models give the same log-probs, values, updates, weights, checkpoints and exports as one rank."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines import peer_ranks
from tests.unit.trainer.engines.tiny_experts import save_tiny_experts
from tests.unit.trainer.engines.tiny_llama import VOCABULARY
from tests.unit.trainer.engines.two_ranks import make_policy

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 540

# The model: tied embeddings; biases and untied ones; norms of single heads.
LAYOUTS = {
    "shard 2 x sequence 2": (ParallelDims(shard=2, sequence=2), "llama"),
    "sequence 2 x context 2": (ParallelDims(sequence=2, context=2), "llama"),
    "shard 2 x tensor 2": (ParallelDims(shard=2, tensor=2), "llama"),
    "tensor 2 of qwen3": (ParallelDims(tensor=2), "qwen3"),
    "replicate 2 x shard 2": (ParallelDims(replicate=2, shard=2), "llama"),
    "context 2 x tensor 2": (ParallelDims(context=2, tensor=2), "qwen3"),
    "pipeline 2 x shard 2": (ParallelDims(pipeline=2, shard=2), "qwen2"),
    "expert 2 of 4 ranks": (ParallelDims(shard=4, expert=2), "experts"),
    "replicate 2 x sequence 2": (ParallelDims(replicate=2, sequence=2), "qwen2"),
}
LONG = {
    "tensor 2 of qwen2": (ParallelDims(tensor=2), "qwen2"),
    "replicate 2, not sharded": (ParallelDims(replicate=2), "qwen3"),
    "replicate 2 x tensor 2": (ParallelDims(replicate=2, tensor=2), "llama"),
    "pipeline 2": (ParallelDims(pipeline=2), "llama"),
    "pipeline 2 of qwen3": (ParallelDims(pipeline=2), "qwen3"),
    "pipeline 2 x sequence 2": (ParallelDims(pipeline=2, sequence=2), "qwen3"),
    "pipeline 2 x replicate 2": (ParallelDims(pipeline=2, replicate=2), "llama"),
    "pipeline 2 x shard 2 x tensor 2": (ParallelDims(shard=2, tensor=2, pipeline=2), "llama"),
    "replicate 2 x shard 2 x tensor 2": (ParallelDims(2, 2, 1, 2), "llama"),
    "replicate 2 x context 2 x tensor 2": (ParallelDims(replicate=2, context=2, tensor=2), "qwen2"),
    "shard 2 x context 2 x tensor 2": (ParallelDims(shard=2, context=2, tensor=2), "llama"),
}
UNTIED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": peer_ranks.NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Seen:
    """What the ranks of a layout wrote, and what one rank alone computes."""

    folder: Path
    dims: ParallelDims
    model: Path
    ranks: list[dict[str, Any]]
    of_one: dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    torch.manual_seed(7)
    Qwen2ForCausalLM(Qwen2Config(**UNTIED)).save_pretrained(folder / "qwen2")
    Qwen3ForCausalLM(Qwen3Config(**UNTIED)).save_pretrained(folder / "qwen3")
    experts = save_tiny_experts(folder / "experts")
    return {"llama": model_path, "qwen2": folder / "qwen2", "qwen3": folder / "qwen3", "experts": experts}


@pytest.fixture(scope="module")
def alone(
    parallel: ParallelMesh, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    def compute(family: str) -> dict[str, Any]:
        return peer_ranks.run(parallel, models[family], peer_ranks.whole_batch(), tmp_path_factory.mktemp("one"))

    return functools.cache(compute)


@pytest.fixture(scope="module", params=[*LAYOUTS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def seen(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    models: dict[str, Path],
    alone: Callable[[str], dict[str, Any]],
) -> Seen:
    dims, family = (LAYOUTS | LONG)[request.param]
    folder = tmp_path_factory.mktemp("peers")
    run_ranks(dims, models[family], folder)
    ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(dims.world_size)]
    return Seen(folder, dims, models[family], ranks, alone(family))


def run_ranks(dims: ParallelDims, model_path: Path, folder: Path, work: peer_ranks.Work = peer_ranks.run) -> None:
    # Forked from one process that has torch and transformers loaded: a rank starts in no time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([peer_ranks.__name__, "transformers.models.llama.modeling_llama"])
    store = listen("127.0.0.1", LIMIT_SECONDS)
    ranks = [
        context.Process(target=peer_ranks.run_rank, args=(rank, store.port, dims, model_path, folder, work))
        for rank in range(dims.world_size)
    ]
    deadline = time.monotonic() + LIMIT_SECONDS
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.join(10)
    reasons = [file.read_text() for file in folder.glob("rank-*.txt")]
    assert [process.exitcode for process in ranks] == [0] * dims.world_size, "\n".join(reasons)


def test_peers_agree_on_all_that_they_compute(seen: Seen) -> None:
    for rank, mine in enumerate(seen.ranks):
        first = seen.ranks[seen.dims.shard_of(rank) * seen.dims.model_parallel]
        torch.testing.assert_close(mine["log_probs"], first["log_probs"], atol=0, rtol=0)
        torch.testing.assert_close(mine["values"], first["values"], atol=0, rtol=0)
        assert mine["metrics"] == pytest.approx(seen.ranks[0]["metrics"], rel=1e-6)
        torch.testing.assert_close(mine["weights"], seen.ranks[0]["weights"], atol=0, rtol=0)


@pytest.mark.parametrize("key", ["log_probs", "values"])
def test_the_shards_together_are_what_one_rank_computes(seen: Seen, key: str) -> None:
    whole = torch.zeros_like(seen.of_one[key])
    for number in range(seen.dims.num_shards):
        rows = peer_ranks.rows_of(number, seen.dims.num_shards)
        whole[rows] = seen.ranks[number * seen.dims.model_parallel][key]
    torch.testing.assert_close(whole, seen.of_one[key], atol=1e-5, rtol=1e-4)


def test_weights_are_whole_and_have_their_names(seen: Seen) -> None:
    assert list(seen.ranks[0]["before"]) == list(seen.of_one["before"])
    torch.testing.assert_close(seen.ranks[0]["before"], seen.of_one["before"], atol=0, rtol=0)


def test_layers_that_travel_together_are_gathered_once_for_a_push(seen: Seen) -> None:
    for rank in seen.ranks:
        messages = 1 + (seen.dims.expert > 1)
        assert rank["num_unshards"] == messages, "the tiny model's layers are one message, divided experts another"
        torch.testing.assert_close(rank["together"], rank["before"], atol=0, rtol=0)


def test_tensor_parallel_ranks_sum_four_tensors_of_a_layer(seen: Seen) -> None:
    # Outputs of attention and MLP in the forward pass, gradients of their inputs in the backward pass. Norms of heads
    # add one more: the gradients of their weights, together.
    of_heads = seen.model.name == "qwen3"
    expected = 4 + of_heads if seen.dims.tensor > 1 else 0
    assert [mine["sums_of_layer"] for mine in seen.ranks] == [expected] * len(seen.ranks)


def test_layers_compute_without_conversions_of_their_parameters(seen: Seen) -> None:
    # torch's Python code of a conversion takes longer than a GPU needs for most operations.
    assert [mine["conversions"] for mine in seen.ranks] == [0] * len(seen.ranks)


def test_the_update_is_that_of_one_rank(seen: Seen) -> None:
    metrics = seen.ranks[0]["metrics"]
    assert metrics == pytest.approx(seen.of_one["metrics"], rel=1e-4, abs=1e-5)
    assert metrics["actor/grad_norm"] > 0.01
    for name, tensor in seen.ranks[0]["weights"].items():
        assert (tensor - seen.of_one["weights"][name]).abs().mean() < 1e-5, name
    assert seen.ranks[0]["second"] == pytest.approx(seen.of_one["second"], rel=1e-3, abs=1e-4)


def test_its_checkpoint_is_read_by_one_rank(seen: Seen, parallel: ParallelMesh) -> None:
    policy = make_policy(parallel, seen.model)
    policy.restore(seen.folder / "checkpoint")
    weights = [tensor.float().clone() for tensor in policy.weights().gather()]
    torch.testing.assert_close(weights, list(seen.ranks[0]["weights"].values()), atol=0, rtol=0)
    assert policy.update(peer_ranks.whole_batch()) == pytest.approx(seen.ranks[0]["second"], rel=1e-3, abs=1e-4)


def test_its_export_is_the_whole_model(seen: Seen) -> None:
    exported = {
        name: tensor.float()
        for file in (seen.folder / "export").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    rounded = {name: weights.bfloat16().float() for name, weights in seen.ranks[0]["weights"].items()}
    torch.testing.assert_close(exported, rounded, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        (ParallelDims(tensor=2), ParallelDims(shard=2)),
        (ParallelDims(tensor=2), ParallelDims(sequence=2)),
        (ParallelDims(context=2), ParallelDims(shard=2)),
        (ParallelDims(tensor=2), ParallelDims(sequence=2, context=2)),
        (ParallelDims(shard=2), ParallelDims(tensor=2)),
        (ParallelDims(replicate=2, shard=2), ParallelDims(tensor=2)),
        (ParallelDims(tensor=2), ParallelDims(replicate=2, shard=2)),
        (ParallelDims(pipeline=2), ParallelDims(shard=2)),
        (ParallelDims(tensor=2), ParallelDims(pipeline=2)),
        (ParallelDims(shard=2), ParallelDims(shard=4, expert=2)),
        (ParallelDims(shard=4, expert=2), ParallelDims(shard=2, expert=2)),
        (ParallelDims(shard=2, expert=2), ParallelDims(shard=2)),
    ],
    ids=str,
)
def test_a_checkpoint_is_read_by_another_layout(
    saved_by: ParallelDims, resumed_by: ParallelDims, models: dict[str, Path], tmp_path: Path
) -> None:
    model_path = models["experts" if max(saved_by.expert, resumed_by.expert) > 1 else "llama"]
    (tmp_path / "first").mkdir()
    run_ranks(saved_by, model_path, tmp_path / "first")
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "checkpoint").rename(tmp_path / "second" / "saved")
    run_ranks(resumed_by, model_path, tmp_path / "second", peer_ranks.resume)
    went_on = torch.load(tmp_path / "first" / "rank-0.pt")["second"]
    resumed = torch.load(tmp_path / "second" / "rank-0.pt")["second"]
    assert resumed == pytest.approx(went_on, rel=1e-3, abs=1e-4)
