"""One rank of a layout with adapters or other options: trains two steps, and reads what another layout saved."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from ppojob_trainer.engines.train.fsdp import export as export_module
from ppojob_trainer.engines.train.fsdp import export_files, layers
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.loading import write_shard
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.weights.buckets import PartlyFrozenSource
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH
from tests.unit.trainer.engines.two_ranks import make_critic, make_policy

FILE_BYTES: Final = 12_000
"""Less than the weights of a layer."""
PARTS: Final = (layers._attention, layers._recomputed_attention)
"""What is compiled of a layer with divided experts."""


def run(
    parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path, *, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return everything that is compared between one rank and many. `settings`: of the models, and `stays_gathered`."""
    with quickly_compiled():
        engines = {
            "actor": make_policy(parallel, model, **settings),
            "critic": make_critic(parallel, model, **settings),
        }
    policy = engines["actor"]
    found: dict[str, Any] = {"initial": {role: trained(engine) for role, engine in engines.items()}}
    for engine in engines.values():
        fill_second_matrices(engine)
    found["log_probs"] = policy.forward(batch).padded("old_log_probs", RESPONSE_LENGTH)
    found["reference"] = policy.forward(batch, with_adapters=False).padded("old_log_probs", RESPONSE_LENGTH)
    found["values"] = engines["critic"].forward(batch).padded("values", RESPONSE_LENGTH)
    for role, engine in engines.items():
        found[role] = observed_update(engine, batch)
    policy.save(folder / "checkpoint")
    # Where torch cannot compile a layer, it says nothing and runs the layer as it is.
    found["compilation"] = {
        # Ranks of a pipeline have other layers, and so other numbers of graphs.
        "is_compiled": counters["stats"]["unique_graphs"] > 0,
        "refused": len(counters["unimplemented"]),
        "parts": sum(len(_debug_get_cache_entry_list(part.__code__)) for part in PARTS),
    }
    return found | exported(policy, folder) | {"second": policy.update(batch)}


def resume(
    parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path, *, settings: dict[str, Any]
) -> dict[str, Any]:
    """Read the checkpoint `saved` of another layout, which the folder holds."""
    with quickly_compiled():
        policy = make_policy(parallel, model, **settings)
    policy.restore(folder / "saved")
    return exported(policy, folder) | {"second": policy.update(batch)}


def quickly_compiled() -> AbstractContextManager[object]:
    """Let layers that are created inside be traced and partitioned as on a GPU, and run by PyTorch's own operators.

    On a CPU, Inductor takes minutes.
    """
    return mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager", dynamic=True))


def fill_second_matrices(engine: FSDPEngine) -> None:
    """Draw B of all adapters. It begins at 0, and then A has no gradient."""
    with engine._offloader.on_device(moments=True):
        for name, parameter in engine.module.named_parameters():
            if name.endswith(".lora_B"):
                # By name, because a pipeline stage has some of the adapters.
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                write_shard(parameter, 0.1 * torch.randn(parameter.shape, generator=generator), name)


def observed_update(engine: FSDPEngine, batch: DataProto) -> dict[str, Any]:
    """Make one update of two optimizer steps; return their gradients before clipping, and what they changed."""
    gradients: list[dict[str, Tensor]] = []
    clip = engine.optimizer.clip

    def observed_clip() -> Tensor:
        gradients.append({name: whole(value.grad) for name, value in parameters(engine.module).items()})
        return clip()

    engine.optimizer.clip = observed_clip  # type: ignore[method-assign]
    before = trained(engine)
    metrics = engine.update(batch)
    engine.optimizer.clip = clip  # type: ignore[method-assign]
    return {"gradients": gradients, "before": before, "after": trained(engine), "metrics": metrics}


def exported(policy: FSDPEngine, folder: Path) -> dict[str, Any]:
    """Write the export; return the parameters that are trained, and the weights that are sent to the rollout.

    changing: those of a partial push.
    """
    written = exported_files(policy, folder / "export")
    weights = policy.weights()
    sent = {spec.name: tensor.clone() for spec, tensor in zip(weights.specs(), weights.gather(), strict=True)}
    names = [spec.name for spec in weights.specs() if not spec.is_frozen]
    assert isinstance(weights, PartlyFrozenSource)
    changing = dict(zip(names, (tensor.clone() for tensor in weights.gather_changing()), strict=True))
    return {"trained": trained(policy), "sent": sent, "changing": changing, "written": written}


def exported_files(policy: FSDPEngine, folder: Path) -> list[str]:
    """Write the export in small files; return the names of those that this rank wrote, in their order."""
    with (
        mock.patch.object(export_module, "SHARD_BYTES", FILE_BYTES),
        mock.patch.object(export_files, "save_file", side_effect=save_file) as written,
    ):
        policy.export(folder)
    return [call.args[1].name for call in written.call_args_list]


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def trained(engine: FSDPEngine) -> dict[str, Tensor]:
    with engine._offloader.on_device():
        return {name: whole(parameter) for name, parameter in parameters(engine.module).items()}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "each trained parameter has a gradient"
    value = tensor.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).float().clone()
