"""Divided experts: what is exchanged, in which dtype, and what a rank computes that receives no token.

`test_engine_peer_options` and `test_engine_peers` compare layouts with divided experts with one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import experts
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines import peer_ranks
from tests.unit.trainer.engines.fsdp_engines import reference_engine
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_experts import EXPERT_SIZE, NUM_EXPERTS, save_tiny_experts, tiny_experts
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH
from tests.unit.trainer.engines.two_ranks import make_policy


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


def test_a_rank_that_receives_no_row_has_gradients_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    part = own_experts()
    seen: list[int] = []
    multiply = experts.grouped_mm_experts_forward

    def counted(module: Any, rows: Tensor, *others: Tensor) -> Tensor:
        seen.append(len(rows))
        return multiply(module, rows, *others)

    monkeypatch.setattr(experts, "grouped_mm_experts_forward", counted)
    rows = torch.zeros(0, 48, requires_grad=True)

    output = experts._multiply(part, rows, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    output.sum().backward()

    assert output.shape == (0, 48)
    assert seen == [1], "a kernel was called without rows"
    for parameter in part.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def own_experts() -> nn.Module:
    model = tiny_experts()
    _, found = next(experts.expert_modules(model))
    return found
