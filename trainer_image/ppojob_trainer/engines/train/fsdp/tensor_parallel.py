"""Divides every decoder layer over the ranks of a tensor-parallel group, by transformers' plan for the model's family.

    q, k, v, gate, up     by their outputs: a rank computes its heads and its part of the hidden layer
    o, down               by their inputs: the ranks' results are summed
    everything else       whole on each rank: embeddings, norms, output layer, value head

Shoeybi et al. 2019, arXiv 1909.08053, section 3. All parameters become DTensors of the peers' mesh, so that FSDP makes
them DTensors of one mesh of two dimensions, and norms, checkpoints and gathered weights need no case of their own.
Called while a model is built, before `lora` adds adapters to the divided layers, and before FSDP. It refuses families
whose plan has more than these kinds; `divisions` says so before anything is loaded.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from transformers import PretrainedConfig, PreTrainedModel

from ppojob_trainer.engines.train.mesh import ParallelMesh


class _Whole(ParallelStyle):
    """A module whose parameters are whole on each rank.

    inputs: Replicate where the ranks have equal inputs; Shard where each has its own heads: then the gradients of the
    ranks are parts of the whole, and are summed.
    """

    def __init__(self, inputs: Placement) -> None:
        super().__init__()
        self.inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # The types of torch's declaration leave out that hooks may return what takes the place of their argument.
        before: Any = partial(_to_mesh, self.inputs)
        after: Any = _from_mesh
        return distribute_module(module, device_mesh, _replicate, before, after)


_STYLES: Final[dict[str, type[ColwiseParallel] | type[RowwiseParallel] | partial[_Whole]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Norms of single heads. The dimension of the heads does not matter to a norm over the last dimension.
    "replicated_with_grad_allreduce": partial(_Whole, Shard(2)),
}
KNOWN_STYLES: Final = frozenset(_STYLES)


def divide(module: nn.Module, language_model: PreTrainedModel, backbone: nn.Module, parallel: ParallelMesh) -> None:
    """Divide `module`, which holds the language model with this decoder; without tensor parallelism do nothing."""
    mesh = parallel.tensor_mesh
    if mesh is None:
        return
    styles = {_pattern(name): _STYLES[style] for name, style in plan_of(language_model.config).items()}
    is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    embeddings, output = language_model.get_input_embeddings(), language_model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # A pipeline stage may have one of the two, or neither.
    weights = [getattr(part, "weight", None) for part in (embeddings, output)]
    is_tied = weights[0] is weights[1] is not None
    names = {id(part): name for name, part in backbone.named_modules()}
    for part in list(module.modules()):
        if not any(True for _ in part.parameters(recurse=False)) or (is_tied and part is output):
            continue
        name = names.get(id(part), "")
        style = next((style for pattern, style in styles.items() if pattern.fullmatch(name)), None)
        parallelize_module(part, mesh, _Whole(Replicate()) if style is None else style(), src_data_rank=None)
    if is_tied:
        output.weight = embeddings.weight
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_trained[name])


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """Return transformers' plan for the layers of this family; empty if it has none."""
    # The plan of the class: an instance adds its embedding, which is whole on each rank here.
    return getattr(type(config), "base_model_tp_plan", None) or {}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; all of it if the tensor is replicated. Differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def _replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole))


def _to_mesh(inputs: Placement, _: nn.Module, arguments: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    first, *others = arguments
    return DTensor.from_local(first, mesh, [inputs], run_check=False), *others


def _from_mesh(_: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
    return local(output)
