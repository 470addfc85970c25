"""Mixtures of experts on tensor-parallel ranks: the tests of `test_engine_peer_options` on layouts of their own, and
micro-batches with fewer tokens than ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.models.support import FAMILIES, Support
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines import option_ranks, peer_ranks, test_engine_peer_options
from tests.unit.trainer.engines.test_engine_peer_options import (
    BOTH,
    OF_ATTENTION,
    Layout,
    all_models,
    alone,
    models,
    read_ranks,
    seen_of,
    test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes,
    test_layers_are_compiled_where_the_job_says_so,
    test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes,
    test_ranks_of_a_group_stay_equal,
    test_the_initial_values_are_those_of_one_rank,
    test_the_outputs_are_those_of_one_rank,
    test_two_optimizer_steps_are_those_of_one_rank,
)
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_experts import saved, tiny_experts
from tests.unit.trainer.engines.tiny_llama import make_batch
from tests.unit.trainer.engines.two_ranks import make_policy

# The fixtures and tests of the other module, which run here too.
__all__ = [
    "all_models",
    "alone",
    "models",
    "test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes",
    "test_layers_are_compiled_where_the_job_says_so",
    "test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes",
    "test_ranks_of_a_group_stay_equal",
    "test_the_initial_values_are_those_of_one_rank",
    "test_the_outputs_are_those_of_one_rank",
    "test_two_optimizer_steps_are_those_of_one_rank",
]

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tensor 2, expert 2, one without tokens": Layout(ParallelDims(tensor=2, expert=2), "starved", None),
    "tensor 2, expert 2, mixtral, adapters": Layout(ParallelDims(tensor=2, expert=2), "mixtral"),
    "tensor 2 x context 2, expert 2": Layout(ParallelDims(context=2, tensor=2, expert=2), "experts", None),
}
LONG = {
    # torch traces a layer of experts for minutes.
    "tensor 2, expert 2, mixtral, adapters, compiled": Layout(
        ParallelDims(tensor=2, expert=2), "mixtral", options={"compile": True}
    ),
    "tensor 2": Layout(ParallelDims(tensor=2), "experts", None),
    # With biases and sinks.
    "tensor 2 of gpt oss": Layout(ParallelDims(tensor=2), "gpt_oss", None),
    "tensor 2 of gpt oss, adapters": Layout(ParallelDims(tensor=2), "gpt_oss"),
    "tensor 2 of gpt oss, adapters on the attention, compiled": Layout(
        ParallelDims(tensor=2), "gpt_oss", OF_ATTENTION, {"compile": True}
    ),
    "tensor 2 x pipeline 2, expert 2 of gpt oss": Layout(ParallelDims(tensor=2, pipeline=2, expert=2), "gpt_oss", None),
    "shard 2 x tensor 2, expert 2 of gpt oss": Layout(ParallelDims(shard=2, tensor=2, expert=2), "gpt_oss", None),
    "shard 2 x tensor 2, expert 2": Layout(ParallelDims(shard=2, tensor=2, expert=2), "experts", None),
    "tensor 2, adapters, gathered": Layout(
        ParallelDims(tensor=2), "experts", OF_ATTENTION, {"stays_gathered": True, "gradient_checkpointing": False}
    ),
    "shard 2 x tensor 2, all offloaded": Layout(
        ParallelDims(shard=2, tensor=2), "mixtral", None, {"offload": BOTH, "activation_offload": True}
    ),
    "shard 2 x tensor 2, expert 4, gathered": Layout(
        ParallelDims(shard=2, tensor=2, expert=4), "starved", None, {"stays_gathered": True}
    ),
    "tensor 2 x pipeline 2, expert 2": Layout(ParallelDims(tensor=2, pipeline=2, expert=2), "experts", None),
    "tensor 2 x pipeline 2 of two stages each": Layout(
        ParallelDims(tensor=2, pipeline=2, virtual=2), "deep experts", None
    ),
    "shard 2 x tensor 2 x pipeline 2, expert 2": Layout(
        ParallelDims(shard=2, tensor=2, pipeline=2, expert=2), "experts", None
    ),
    "replicate 2 x tensor 2, expert 2": Layout(ParallelDims(replicate=2, tensor=2, expert=2), "experts", None),
    "replicate 2 x shard 2 x tensor 2, expert 2, adapters": Layout(
        ParallelDims(replicate=2, shard=2, tensor=2, expert=2), "experts", OF_ATTENTION
    ),
    "shard 2 x context 2 x tensor 2, expert 2": Layout(
        ParallelDims(shard=2, context=2, tensor=2, expert=2), "mixtral", None
    ),
}


seen = seen_of(LAYOUTS, LONG)


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(tensor=4),
        ParallelDims(tensor=4, expert=2),
        ParallelDims(context=2, tensor=2),
        ParallelDims(context=2, tensor=2, expert=2),
    ],
    ids=str,
)
def test_ranks_without_a_token_take_part(parallel: ParallelMesh, tmp_path: Path, dims: ParallelDims) -> None:
    path = saved(tiny_experts(num_key_value_heads=4), tmp_path / "model")
    of_one = short_steps(parallel, path, peer_ranks.whole_batch(), tmp_path)

    run_ranks(dims, path, tmp_path, short_steps)

    for found in read_ranks(dims, tmp_path):
        torch.testing.assert_close(found["log_probs"], of_one["log_probs"], atol=1e-5, rtol=1e-4)
        assert found["gradients"].keys() == of_one["gradients"].keys()
        for name, gradient in of_one["gradients"].items():
            # A prompt's only token has nothing to choose from in attention, so the queries' gradient is rounding.
            # Float32 sums in another order, as on another processor, differ; a missing part makes more than 0.1.
            tolerance = max(1e-3 * float(gradient.abs().max()), 1e-6)
            torch.testing.assert_close(found["gradients"][name], gradient, atol=tolerance, rtol=0)
    assert of_one["gradients"]["language_model.model.layers.0.mlp.experts.down_proj"].abs().max() > 1e-3


def short_steps(parallel: ParallelMesh, model: Path, _: DataProto, __: Path) -> dict[str, Any]:
    """An update with micro-batches of two tokens."""
    batch = make_batch(2, longest=(1, 1))
    policy = make_policy(parallel, model, max_tokens=2 // parallel.dims.slices)
    log_probs = policy.forward(batch).padded("old_log_probs", 1)
    (gradients, *_) = option_ranks.observed_update(policy, batch)["gradients"]
    return {"log_probs": log_probs, "gradients": gradients}


def test_the_families_with_tensor_parallelism_are_tested_with_adapters() -> None:
    peers = test_engine_peer_options.LAYOUTS | test_engine_peer_options.LONG
    layouts = [*peers.values(), *LAYOUTS.values(), *LONG.values()]
    divided = [layout for layout in layouts if layout.dims.tensor > 1 and layout.lora is not None]
    names = {"experts": "qwen3_moe", "many heads": "llama", "deeper": "llama"}
    tested = {names.get(layout.family, layout.family) for layout in divided} - {"biases"}
    is_supported = (Support.TESTED, Support.NOT_EXPERTS)
    assert tested == {name for name, family in FAMILIES.items() if family.tensor_parallel in is_supported}
