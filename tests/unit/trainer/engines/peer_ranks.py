"""One rank of a layout with peers: runs the engines on its shard and writes what it saw."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH, make_batch
from tests.unit.trainer.engines.two_ranks import make_critic, make_policy

MINIBATCHES = 2
NUM_LAYERS = 2
Work = Callable[[ParallelMesh, Path, DataProto, Path], dict[str, Any]]


def whole_batch() -> DataProto:
    return make_batch(8, num_mini_batches=MINIBATCHES)


def rows_of(number: int, num_shards: int) -> list[int]:
    """The rows of one data-parallel rank: its part of each minibatch of four."""
    part = 4 // num_shards
    return [4 * minibatch + part * number + row for minibatch in range(MINIBATCHES) for row in range(part)]


def run(parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path) -> dict[str, Any]:
    """Everything that is compared between one rank and many."""
    policy, critic = make_policy(parallel, model), make_critic(parallel, model)
    log_probs = policy.forward(batch).padded("old_log_probs", RESPONSE_LENGTH)
    values = critic.forward(batch).padded("values", RESPONSE_LENGTH)
    names = [spec.name for spec in policy.weights().specs()]
    before = dict(zip(names, [tensor.clone() for tensor in policy.weights().gather()], strict=True))
    gathered = make_policy(parallel, model, stays_gathered=True, gradient_checkpointing=False)
    with mock.patch.object(FSDPModule, "unshard", autospec=True, side_effect=FSDPModule.unshard) as unshard:
        together = dict(zip(names, [tensor.clone() for tensor in gathered.weights().gather()], strict=True))
    metrics = {**policy.update(batch), **critic.update(batch)}
    policy.save(folder / "checkpoint")
    policy.export(folder / "export")
    weights = dict(zip(names, [tensor.float().clone() for tensor in policy.weights().gather()], strict=True))
    return {
        "log_probs": log_probs,
        "values": values,
        "metrics": metrics,
        "before": before,
        "together": together,
        "num_unshards": unshard.call_count,
        "sums_of_layer": sums_of_layer(parallel, gathered, batch),
        "conversions": conversions(gathered, batch),
        "weights": weights,
        "second": policy.update(batch),
    }


def sums_of_layer(parallel: ParallelMesh, policy: FSDPEngine, batch: DataProto) -> float:
    """How often the tensor-parallel ranks sum a tensor for a layer, in the forward and backward pass together."""
    if parallel.tensor_mesh is None:
        return 0.0
    group = parallel.tensor_mesh.get_group()
    passes: list[int] = []
    policy.module.register_forward_hook(lambda *_: passes.append(1))
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sums:
        policy.update(batch)
    layers = NUM_LAYERS // parallel.dims.pipeline
    # The norm of the gradients is one number, and of no layer.
    of_layers = [call for call in sums.call_args_list if call.args[0].ndim > 0]
    return sum(call.kwargs.get("group") is group for call in of_layers) / (len(passes) * layers)


def conversions(policy: FSDPEngine, batch: DataProto) -> int:
    """How often an update's forward and backward passes convert between DTensors and plain tensors."""
    found: list[int] = []
    passes = type(policy._passes)
    compute = passes.backward

    def counted(*arguments: Any) -> None:
        with (
            mock.patch.object(DTensor, "to_local", autospec=True, side_effect=DTensor.to_local) as to_local,
            mock.patch.object(DTensor, "from_local", side_effect=DTensor.from_local) as from_local,
            mock.patch.object(DTensor, "redistribute", autospec=True, side_effect=DTensor.redistribute) as redistribute,
        ):
            compute(*arguments)
        found.append(to_local.call_count + from_local.call_count + redistribute.call_count)

    with mock.patch.object(passes, "backward", counted):
        policy.update(batch)
    return sum(found)


def resume(parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path) -> dict[str, Any]:
    """Resume from the checkpoint of another layout, the folder's `saved`."""
    policy = make_policy(parallel, model)
    policy.restore(folder / "saved")
    return {"second": policy.update(batch)}


def run_rank(rank: int, port: int, dims: ParallelDims, model: Path, out: Path, work: Work = run) -> None:
    """What one process does; it leaves `rank-<rank>.pt`, or the reason why not in `rank-<rank>.txt`."""
    torch.set_num_threads(1)
    try:
        parallel = init_process_group(Device.CPU, rank, dims, connect("127.0.0.1", port, 120), 120)
        shard = whole_batch()[rows_of(dims.shard_of(rank), dims.num_shards)]
        torch.save(work(parallel, model, shard, out), out / f"rank-{rank}.pt")
        parallel.destroy()
    except BaseException:
        (out / f"rank-{rank}.txt").write_text(traceback.format_exc())
        raise
