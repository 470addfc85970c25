"""Adapters on experts that several ranks compute together: the tests of `test_engine_peer_options` on layouts of their
own."""

from __future__ import annotations

import pytest

from ppojob_trainer.engines.train.dims import ParallelDims
from tests.unit.trainer.engines.test_engine_peer_options import (
    BOTH,
    Layout,
    all_models,
    alone,
    models,
    seen_of,
    test_a_partial_push_gathers_the_modules_with_adapters,
    test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes,
    test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes,
    test_ranks_of_a_group_stay_equal,
    test_the_initial_values_are_those_of_one_rank,
    test_the_outputs_are_those_of_one_rank,
    test_two_optimizer_steps_are_those_of_one_rank,
)

# The fixtures and tests of the other module, which run here too.
__all__ = [
    "all_models",
    "alone",
    "models",
    "test_a_partial_push_gathers_the_modules_with_adapters",
    "test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes",
    "test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes",
    "test_ranks_of_a_group_stay_equal",
    "test_the_initial_values_are_those_of_one_rank",
    "test_the_outputs_are_those_of_one_rank",
    "test_two_optimizer_steps_are_those_of_one_rank",
]

pytestmark = pytest.mark.slow

# All linear layers have adapters.
LAYOUTS = {"expert 2, one without tokens": Layout(ParallelDims(shard=2, expert=2), "starved")}
LONG = {
    "shard 2, gathered": Layout(ParallelDims(shard=2), "experts", options={"stays_gathered": True}),
    "shard 2, nothing recomputed": Layout(ParallelDims(shard=2), "experts", options={"gradient_checkpointing": False}),
    "tensor 2": Layout(ParallelDims(tensor=2), "experts"),
    "expert 2 of deepseek": Layout(ParallelDims(shard=2, expert=2), "deepseek"),
    "expert 2 of 4 ranks, gathered, nothing recomputed": Layout(
        ParallelDims(shard=4, expert=2), "experts", options={"gradient_checkpointing": False, "stays_gathered": True}
    ),
    "expert 4 of shard 2 x sequence 2, all offloaded": Layout(
        ParallelDims(shard=2, sequence=2, expert=4), "starved", options={"offload": BOTH, "activation_offload": True}
    ),
    "expert 2 x replicate 2 of mixtral": Layout(ParallelDims(replicate=2, shard=2, expert=2), "mixtral"),
    # Its experts have transposed weights and biases, and are fused in checkpoints, too.
    "shard 2 of gpt oss, all offloaded": Layout(
        ParallelDims(shard=2), "gpt_oss", options={"offload": BOTH, "activation_offload": True}
    ),
    # Of six experts, the last rank has none.
    "shard 4 of gpt oss": Layout(ParallelDims(shard=4), "gpt_oss"),
    "expert 2 of gpt oss": Layout(ParallelDims(shard=2, expert=2), "gpt_oss"),
    "expert 2 of 4 ranks of gpt oss": Layout(ParallelDims(shard=4, expert=2), "gpt_oss"),
    "pipeline 2 x expert 2 of gpt oss": Layout(ParallelDims(shard=2, pipeline=2, expert=2), "gpt_oss"),
    "pipeline 2 x expert 2": Layout(ParallelDims(shard=2, pipeline=2, expert=2), "experts"),
    "pipeline 2 of two stages each, gathered": Layout(
        ParallelDims(shard=2, pipeline=2, virtual=2), "deep experts", options={"stays_gathered": True}
    ),
}

seen = seen_of(LAYOUTS, LONG)
