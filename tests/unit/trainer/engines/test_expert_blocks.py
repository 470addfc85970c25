"""The experts of large mixtures, gathered in blocks: the same weights as those of whole layers, and few at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import expert_blocks, low_rank
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_experts import EXPERT_SIZE, MIXTURES, NUM_EXPERTS, save_tiny_experts
from tests.unit.trainer.engines.two_ranks import make_policy

WIDTH = 48
OF_EXPERT = 2 * EXPERT_SIZE * WIDTH * torch.float32.itemsize
"""Bytes of an expert's gate and up projection."""
LAYOUTS = {
    "uneven shards": ("qwen3_moe", ParallelDims(shard=4), 1),
    "divided experts": ("mixtral", ParallelDims(shard=2, expert=2), 2),
    "divided and sharded experts, in copies": ("qwen3_moe", ParallelDims(replicate=2, shard=2, expert=2), 1),
    "a pipeline": ("deepseek_v3", ParallelDims(pipeline=2, shard=2, expert=2), 2),
    "tensor-parallel attention": ("qwen3_moe", ParallelDims(shard=2, tensor=2), NUM_EXPERTS),
}
"""Family, layout, and experts of a block."""


def gathered(policy: FSDPEngine) -> dict[str, torch.Tensor]:
    weights = policy.weights()
    specs = weights.specs()
    found = {spec.name: one.clone() for spec, one in zip(specs, weights.gather(), strict=True)}
    assert all(tuple(found[spec.name].shape) == spec.shape for spec in specs)
    return found


def load_export(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def in_both_ways(parallel: ParallelMesh, model: Path, _: DataProto, folder: Path) -> dict[str, Any]:
    policy = make_policy(parallel, model)
    offloaded = make_policy(parallel, model, offload={"parameters": True})
    together = make_policy(parallel, model, stays_gathered=True, gradient_checkpointing=False)
    number = int((folder / "number").read_text())
    whole = gathered(policy)
    largest = mock.patch.multiple(expert_blocks, LARGE_BYTES=OF_EXPERT, BLOCK_BYTES=number * OF_EXPERT + 1)
    sent: list[int] = []

    def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size() if tensor.ndim == 3 else 0)
        return original(tensor, *args, **kwargs)

    original = dist.broadcast
    with largest:
        with mock.patch.object(dist, "broadcast", broadcast):
            blocks = gathered(policy)
        others = [gathered(offloaded), gathered(together)]
        policy.export(folder / "in blocks")
    policy.export(folder / "whole")
    return {"whole": whole, "blocks": blocks, "others": others, "most": max(sent), "num_blocks": sum(map(bool, sent))}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_have_the_weights_of_whole_layers(tmp_path: Path, name: str) -> None:
    family, dims, number = LAYOUTS[name]
    (tmp_path / "number").write_text(f"{number}")

    run_ranks(dims, save_tiny_experts(tmp_path / "model", family=family), tmp_path, in_both_ways)

    for rank in range(dims.world_size):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        for other in (found["blocks"], *found["others"]):
            assert other.keys() == found["whole"].keys()
            torch.testing.assert_close({key: other[key] for key in found["whole"]}, found["whole"], atol=0, rtol=0)
        assert 0 < found["most"] <= number * OF_EXPERT
        assert found["num_blocks"] >= 2
    exports = [load_export(tmp_path / folder) for folder in ("whole", "in blocks")]
    assert exports[0].keys() == exports[1].keys() == found["whole"].keys()
    torch.testing.assert_close(exports[1], exports[0], atol=0, rtol=0)


def merged_experts(parallel: ParallelMesh, model: Path, _: DataProto, folder: Path) -> dict[str, Any]:
    """Return how many projections of experts this rank merges for a push, and for an export."""
    policy = make_policy(parallel, model, lora=LoRA(rank=2))
    counts = []
    for call in (lambda: gathered(policy), lambda: policy.export(folder / "export")):
        with mock.patch.object(low_rank, "merge", side_effect=low_rank.merge) as merge:
            call()
        counts.append(merge.call_count)
    return {"counts": counts}


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(shard=4), ParallelDims(shard=2, pipeline=2, expert=2)], ids=str)
def test_each_rank_merges_adapters_into_its_own_experts_alone(tmp_path: Path, dims: ParallelDims) -> None:
    run_ranks(dims, save_tiny_experts(tmp_path / "model"), tmp_path, merged_experts)
    found = [torch.load(tmp_path / f"rank-{rank}.pt")["counts"] for rank in range(4)]
    in_all = 3 * NUM_EXPERTS * MIXTURES["qwen3_moe"].num_sparse
    assert [sum(counts) for counts in zip(*found, strict=True)] == [in_all, in_all]
    assert max(max(counts) for counts in found) < in_all / 2


def test_one_rank_has_all_experts(parallel: ParallelMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(parallel, save_tiny_experts(tmp_path / "model"))
    whole = gathered(policy)
    monkeypatch.setattr(expert_blocks, "LARGE_BYTES", 0)
    monkeypatch.setattr(expert_blocks, "BLOCK_BYTES", 0)

    blocks = gathered(policy)

    assert list(blocks) != list(whole), "the tensors of an expert come together"
    torch.testing.assert_close({key: blocks[key] for key in whole}, whole, atol=0, rtol=0)
