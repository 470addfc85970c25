"""Routing replay and the load-balancing loss on ranks that divide layers, tokens and experts: those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import engine as engine_module
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.engines import option_ranks, peer_ranks
from tests.unit.trainer.engines.test_engine_peer_options import SAME_GRADIENTS, read_ranks, whole_models
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.test_engine_routing import COEFFICIENT, make_policy, random_recording
from tests.unit.trainer.engines.tiny_experts import saved, tiny_experts
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH

NUM_LAYERS = 5
LAYOUTS = {
    "tensor 2, expert 2": ParallelDims(tensor=2, expert=2),
    "pipeline 2": ParallelDims(pipeline=2),
    "pipeline 2 of two stages each": ParallelDims(pipeline=2, virtual=2),
    "tensor 2 x context 2": ParallelDims(context=2, tensor=2),
}
MANY_RANKS = {
    "pipeline 4": ParallelDims(pipeline=4),
    "pipeline 2 x shard 2, expert 2": ParallelDims(shard=2, pipeline=2, expert=2),
    "pipeline 2 x tensor 2 of two stages each, expert 2": ParallelDims(tensor=2, pipeline=2, expert=2, virtual=2),
    "pipeline 2 x tensor 2 x context 2, expert 2": ParallelDims(context=2, tensor=2, pipeline=2, expert=2),
    "replicate 2 x shard 2 x tensor 2, expert 2": ParallelDims(replicate=2, shard=2, tensor=2, expert=2),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.long) for name in MANY_RANKS)])
@pytest.mark.parametrize("recomputes", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ranks_replay_and_balance_as_one_rank(
    parallel: ParallelMesh, tmp_path: Path, name: str, recomputes: bool
) -> None:
    assert_as_one_rank(parallel, tmp_path, (LAYOUTS | MANY_RANKS)[name], recomputes=recomputes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pipeline_whose_first_stage_has_no_router_balances_as_one_rank(
    parallel: ParallelMesh, tmp_path: Path
) -> None:
    first_stage = [0, 1, 2]
    assert_as_one_rank(parallel, tmp_path, ParallelDims(pipeline=2), recomputes=True, mlp_only_layers=first_stage)


def assert_as_one_rank(
    parallel: ParallelMesh, tmp_path: Path, dims: ParallelDims, *, recomputes: bool, **settings: Any
) -> None:
    """Compare an update over these ranks with one rank's; settings: of the model."""
    path = saved(tiny_experts(num_hidden_layers=NUM_LAYERS, **settings), tmp_path / "model")
    of_one = step(parallel, path, peer_ranks.whole_batch(), tmp_path, recomputes=recomputes)

    run_ranks(dims, path, tmp_path, partial(step, recomputes=recomputes))

    for rank, found in enumerate(whole_models(dims, read_ranks(dims, tmp_path), of_one)):
        rows = peer_ranks.rows_of(rank // dims.pipeline // dims.model_parallel, dims.num_shards)
        torch.testing.assert_close(found["log_probs"], of_one["log_probs"][rows], atol=1e-5, rtol=1e-4)
        for metric, expected in of_one["metrics"].items():
            # The few tokens that fill up the slices of sequences are counted as used experts.
            tolerance = 0.1 if "/expert_i" in metric and dims.slices > 1 else 1e-4
            assert found["metrics"][metric] == pytest.approx(expected, rel=tolerance, abs=1e-5), metric
        for name_, gradient in of_one["gradients"][0].items():
            apart = (found["gradients"][0][name_] - gradient).abs().max() / gradient.abs().max()
            # Orders of the sums differ; see `SAME_GRADIENTS`.
            assert apart < SAME_GRADIENTS[0], f"{name_}: {apart:g} of the gradient"
    assert of_one["metrics"]["actor/routing_differs"] > 0.1
    assert of_one["metrics"]["actor/router_aux_loss"] > 0.1


def step(parallel: ParallelMesh, model: Path, _shard: DataProto, _: Path, *, recomputes: bool) -> dict[str, Any]:
    """An update with replay and balance. The balance is that of a micro-batch, so each has one sequence."""
    dims = parallel.dims
    batch = random_recording(peer_ranks.whole_batch(), NUM_LAYERS)
    batch = batch.with_fields({Keys.REF_LOG_PROB: batch.ragged(Keys.OLD_LOG_PROBS)})
    batch = batch[peer_ranks.rows_of(dims.shard_of(parallel.rank), dims.num_shards)]
    policy = make_policy(parallel, model, 34, COEFFICIENT, gradient_checkpointing=recomputes)
    with mock.patch.object(engine_module, "num_passes", one_for_each):
        log_probs = policy.forward(batch).padded(Keys.OLD_LOG_PROBS, RESPONSE_LENGTH)
        found = option_ranks.observed_update(policy, batch)
    return {
        "log_probs": log_probs,
        "gradients": found["gradients"],
        "metrics": found["metrics"],
        "trained": found["after"],
    }


def one_for_each(lengths: Sequence[int], *_: Any) -> int:
    return len(lengths)
