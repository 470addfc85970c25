"""Ranks that gather keys and values compute what one rank computes, also where there are more of them than heads."""

from __future__ import annotations

import pytest

from ppojob_trainer.engines.train.dims import ParallelDims
from tests.unit.trainer.engines.test_engine_peer_options import (
    BOTH,
    OF_ATTENTION,
    TWO_LAYERS,
    Layout,
    all_models,
    alone,
    seen_of,
    test_it_reads_the_checkpoint_of_one_rank_and_exports_the_same_bytes,
    test_layers_are_compiled_where_the_job_says_so,
    test_one_rank_reads_its_checkpoint_and_exports_the_same_bytes,
    test_ranks_of_a_group_stay_equal,
    test_the_initial_values_are_those_of_one_rank,
    test_the_outputs_are_those_of_one_rank,
    test_two_optimizer_steps_are_those_of_one_rank,
)
from tests.unit.trainer.engines.test_engine_peers import models

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

# The models have 4 query heads and 2 key heads.
LAYOUTS = {
    "context 3": Layout(ParallelDims(context=3), "llama", None),
    "sequence 2 x context 2, all weights": Layout(ParallelDims(sequence=2, context=2), "qwen3", None),
    "context 2 x tensor 2": Layout(ParallelDims(tensor=2, context=2), "qwen3"),
    "shard 2 x context 2, all offloaded": Layout(
        ParallelDims(shard=2, context=2), "qwen2", options={"offload": BOTH, "activation_offload": True}
    ),
    "context 2 of gemma2 with windows": Layout(ParallelDims(context=2), "gemma2"),
    "expert 2 of context 2": Layout(
        ParallelDims(context=2, expert=2), "experts", OF_ATTENTION, {"gradient_checkpointing": False}
    ),
    "replicate 2 x context 2, gathered": Layout(
        ParallelDims(replicate=2, context=2), "llama", TWO_LAYERS, {"stays_gathered": True}
    ),
    "pipeline 2 x context 2": Layout(ParallelDims(pipeline=2, context=2), "qwen3", None),
}
LONG = {
    "context 2": Layout(ParallelDims(context=2), "llama"),
    "context 2 of gemma3 with windows": Layout(ParallelDims(context=2), "gemma3_text"),
    "context 2 of deepseek": Layout(ParallelDims(context=2), "deepseek", None),
    "sequence 2 x context 4": Layout(ParallelDims(sequence=2, context=4), "llama"),
    "shard 2 x context 2 x tensor 2": Layout(ParallelDims(shard=2, tensor=2, context=2), "llama"),
    "pipeline 2 x sequence 2 x context 2 of two stages each": Layout(
        ParallelDims(sequence=2, context=2, pipeline=2, virtual=2), "deep", None
    ),
    "expert 4 of sequence 2 x context 2, deepseek": Layout(
        ParallelDims(sequence=2, context=2, expert=4), "deepseek", None
    ),
}


seen = seen_of(LAYOUTS, LONG)
