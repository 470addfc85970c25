"""Divided experts: which experts a rank has, in which dtype it computes, and which layers are gathered together.

`test_expert_exchange` has the messages. `test_engine_peer_options` and `test_engine_peers` compare layouts with divided
experts with one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import model as model_module
from ppojob_trainer.engines.train.fsdp.model import layers_of_messages
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines import peer_ranks
from tests.unit.trainer.engines.fsdp_engines import reference_engine
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_experts import EXPERT_SIZE, MIXTURES, NUM_EXPERTS, save_tiny_experts
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH
from tests.unit.trainer.engines.two_ranks import Messages, make_policy


def in_bfloat16(parallel: ParallelMesh, model: Path, batch: DataProto, _: Path) -> dict[str, Any]:
    policy = make_policy(parallel, model, dtype=torch.bfloat16)
    held = {
        name: tuple(parameter.to_local().shape)
        for name, parameter in policy.module.named_parameters()
        if parameter.ndim == 3 and isinstance(parameter, DTensor)
    }
    log_probs = policy.forward(batch).padded("old_log_probs", RESPONSE_LENGTH)
    reference = reference_engine(parallel, str(model), max_tokens_per_gpu=40, dtype=torch.bfloat16).forward(batch)
    return {
        "held": held,
        "log_probs": log_probs,
        "reference": reference.padded("old_log_probs", RESPONSE_LENGTH),
        "metrics": policy.update(batch),
    }


@pytest.mark.slow
def test_each_rank_holds_whole_experts_and_computes_in_bfloat16(parallel: ParallelMesh, tmp_path: Path) -> None:
    path, dims = save_tiny_experts(tmp_path / "model"), ParallelDims(shard=2, expert=2)
    expected = in_bfloat16(parallel, path, peer_ranks.whole_batch(), tmp_path)

    run_ranks(dims, path, tmp_path, in_bfloat16)

    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        shapes = {(NUM_EXPERTS // 2, 2 * EXPERT_SIZE, 48), (NUM_EXPERTS // 2, 48, EXPERT_SIZE)}
        assert set(found["held"].values()) == shapes
        rows = peer_ranks.rows_of(rank, 2)
        # A rounding of a hidden state may change which expert is the second one of a token.
        torch.testing.assert_close(found["log_probs"], expected["log_probs"][rows], atol=0.1, rtol=0.05)
        torch.testing.assert_close(found["reference"], found["log_probs"], atol=0, rtol=0)
        norm = expected["metrics"]["actor/grad_norm"]
        assert found["metrics"]["actor/grad_norm"] == pytest.approx(norm, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_frozen_experts_compute_as_trained_ones_in_bfloat16(tmp_path: Path, family: str) -> None:
    """FSDP gathers those that are trained, and leaves those that are frozen."""
    path = save_tiny_experts(tmp_path / "model", torch.bfloat16, family)

    run_ranks(ParallelDims(shard=2, expert=2), path, tmp_path, in_bfloat16)

    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        torch.testing.assert_close(found["reference"], found["log_probs"], atol=0, rtol=0)


def gathered_together(parallel: ParallelMesh, model: Path, batch: DataProto, _: Path) -> dict[str, Any]:
    """With messages of at least 40 kB: of a layer, a rank has 28 kB of experts, and 15 kB are gathered."""
    vars(model_module)["MESSAGE_BYTES"] = 40_000
    options: dict[str, Any] = {"max_tokens_per_gpu": 40, "dtype": torch.bfloat16}
    freed, gathered = (
        reference_engine(parallel, str(model), stays_gathered=stays, **options) for stays in (False, True)
    )
    with Messages() as seen:
        found = gathered.forward(batch)
    return {
        "gathers": seen.gathers,
        "log_probs": [each.padded("old_log_probs", RESPONSE_LENGTH) for each in (found, freed.forward(batch))],
    }


@pytest.mark.slow
def test_frozen_experts_that_are_not_gathered_do_not_keep_layers_apart(tmp_path: Path) -> None:
    path = save_tiny_experts(tmp_path / "model", family="mixtral")

    run_ranks(ParallelDims(shard=2, expert=2), path, tmp_path, gathered_together)

    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        # The three layers, and what is in none of them.
        assert found["gathers"] == 1 + 1
        torch.testing.assert_close(*found["log_probs"], atol=0, rtol=0)


def test_a_message_counts_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 200 bytes of each layer, beside 800 that are left."""
    layers = [nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(40, 10, bias=False)) for _ in range(5)]
    left = {layer.get_parameter("1.weight") for layer in layers}
    monkeypatch.setattr(model_module, "MESSAGE_BYTES", 400)

    found = [len(together) for together in layers_of_messages(layers, torch.bfloat16, left)]

    assert found == [2, 2, 1]
