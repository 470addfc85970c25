"""Divides every decoder layer over the ranks of a tensor-parallel group, by a plan for the model's family.

    q, k, v, gate, up     by their outputs: a rank computes its heads and its part of the hidden layer
    o, down               by their inputs: the ranks' results are summed
    sinks of attention    by the heads that a rank computes
    router                whole on each rank, which computes a slice of the tokens (`token_slices`)
    fused experts         not divided here (`experts`)
    everything else       whole on each rank: embeddings, norms, output layer, value head

Shoeybi et al. 2019, arXiv 1909.08053, section 3: two sums over the ranks in a layer's forward pass (of the outputs of o
and down), and two in its backward pass (of the gradients of the inputs of attention and MLP). All parameters become
DTensors of the peers' mesh, so that FSDP makes them DTensors of one mesh of two dimensions, and norms, checkpoints and
loading need no special case. But a module computes with its parts of them, as plain tensors: for each operation on
DTensors, torch's Python code takes longer than a GPU needs for most of them. So FSDP gathers plain tensors
(`gather_parts`), whose gradients become parts of DTensors when FSDP has reduced them. Of whole parameters in a layer
whose ranks compute different heads, outputs or tokens (norms of single heads, routers, matrices of adapters), each rank
has a part of the gradient; those of a layer are summed in one message.

`divide` is called while a model is built, before `lora` adds adapters to the divided layers, and before FSDP. It
refuses families whose plan has more than these kinds; `divisions` says so before anything is loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from transformers import PretrainedConfig, PreTrainedModel

from ppojob_trainer.engines.train.mesh import ParallelMesh


@dataclass(frozen=True)
class _Style:
    """How a module is divided.

    dim: the dimension of its weight that is divided; None: the module is whole on each rank. parts: each rank computes
    a part of the gradient of a whole parameter of this module or its adapter; their sum is the gradient. of_heads: its
    own parameters have a number for each head.
    """

    dim: int | None = None
    parts: bool = False
    of_heads: bool = False

    @property
    def by_outputs(self) -> bool:
        """The ranks have equal inputs, and the gradients of these are parts, which its block sums."""
        return self.dim == 0

    @property
    def by_inputs(self) -> bool:
        """The ranks' outputs are parts."""
        return self.dim == 1

    def placement(self, parameter: Tensor) -> Shard | Replicate:
        """Return how a parameter of the module is divided: a bias like the outputs."""
        if self.of_heads:
            return Shard(0)
        return Replicate() if self.dim is None or self.dim >= parameter.dim() else Shard(self.dim)

    def sums_gradient(self, name: str, parameter: Tensor) -> bool:
        """Whether each rank computes a part of the gradient of a parameter of the module, which is whole."""
        is_whole = isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()
        return self.parts and is_whole and not (self.by_inputs and name == "bias")


_WHOLE: Final = _Style()
_IN_PARTS: Final = "replicated_with_grad_allreduce"
_HEADS: Final = "heads"
_SLICED: Final = {"mixtral": "layers.*.mlp.gate", "qwen3_moe": "layers.*.mlp.gate", "gpt_oss": "layers.*.mlp.router"}
"""Routers of mixtures whose blocks have a router and fused experts alone, and so can compute a slice of the tokens."""
_PLANS: Final[dict[str, dict[str, str]]] = {
    "gpt_oss": {
        **{f"layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        "layers.*.self_attn.o_proj": "rowwise",
        # Its sinks.
        "layers.*.self_attn": _HEADS,
    }
}
"""Of families for which transformers has none."""
_STYLE: Final = "tensor_parallel_style"
"""Name of a divided module's attribute with its `_Style`."""
_STYLES: Final[dict[str, _Style]] = {
    "colwise": _Style(dim=0, parts=True),
    "rowwise": _Style(dim=1, parts=True),
    # Norms of single heads, of which each rank has some.
    _IN_PARTS: _Style(parts=True),
    _HEADS: _Style(of_heads=True),
}
KNOWN_STYLES: Final = frozenset(_STYLES)


def divide(module: nn.Module, language_model: PreTrainedModel, backbone: nn.Module, parallel: ParallelMesh) -> None:
    """Divide `module`, which holds the language model with this decoder; without tensor parallelism do nothing."""
    mesh = parallel.tensor_mesh
    if mesh is None:
        return
    styles = {_pattern(name): _STYLES[style] for name, style in plan_of(language_model.config).items()}
    embeddings, output = language_model.get_input_embeddings(), language_model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # A pipeline stage may have one of the two, or neither.
    weights = [getattr(part, "weight", None) for part in (embeddings, output)]
    is_tied = weights[0] is weights[1] is not None
    names = {part: name for name, part in backbone.named_modules()}
    layers = list(backbone.get_submodule("layers").children())
    in_layers = {part for layer in layers for part in layer.modules()}
    divided: dict[nn.Module, _Style] = {}
    for part in list(module.modules()):
        if not any(True for _ in part.parameters(recurse=False)) or (is_tied and part is output):
            continue
        if any(parameter.ndim == 3 for parameter in part.parameters(recurse=False)):
            # Fused experts: `experts` divides them over other ranks.
            continue
        name = names.get(part, "")
        style = next((style for pattern, style in styles.items() if pattern.fullmatch(name)), _WHOLE)
        _divide(part, mesh, style, WithParts if part in in_layers else _copied_with_parts)
        divided[part] = style
    blocks = {names[part].rpartition(".")[0]: None for part, style in divided.items() if style.by_outputs}
    for block in map(backbone.get_submodule, blocks):
        _sum_gradient_of_input(block, mesh.get_group())
    for unit in [*layers, *(part for part in divided if part not in in_layers)]:
        _take_parts_before(unit, [part for part in unit.modules() if part in divided], mesh.get_group())
    if is_tied:
        output.weight = embeddings.weight


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """Return the plan for the layers of this family, transformers' if it has one; empty if there is none."""
    family = config.model_type
    # The plan of the class: an instance adds its embedding, which is whole on each rank here.
    plan: dict[str, str] = getattr(type(config), "base_model_tp_plan", None) or _PLANS.get(family, {})
    if family not in _SLICED:
        return plan
    return {name: style for name, style in plan.items() if ".experts" not in name} | {_SLICED[family]: _IN_PARTS}


def divide_parameters(module: nn.Module, mesh: DeviceMesh, placement: Callable[[Tensor], Placement]) -> None:
    """Make the parameters of a module on the meta device, where there is nothing to send, DTensors of a mesh."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        divided = distribute_tensor(parameter.detach(), mesh, [placement(parameter)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def gather_parts(module: nn.Module) -> None:
    """Let FSDP gather the divided parameters of a sharded module as this rank's parts of them, which are plain tensors.

    Otherwise it gathers DTensors of the mesh that divides them. Shards and their gradients stay DTensors of both
    meshes. torch 2.13 has no public setting for it; with these attributes, FSDP does what it does for a parameter that
    is no DTensor. Before the first forward pass.
    """
    states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    for managed in (managed for group in groups for managed in group.fsdp_params):
        managed.is_dtensor, managed._unsharded_dtensor_spec = False, None
        owner: Any = managed._module_info.module
        name = managed._module_info.param_name
        if getattr(owner, _STYLE, _WHOLE).sums_gradient(name, managed.sharded_param):
            owner.summed = (*owner.summed, name)


def whole_of(gathered: Tensor, shard: Tensor) -> Tensor:
    """Return all of a parameter. Collective where ranks divide it.

    Args:
        gathered: what FSDP gathered of it; shard: it before that, of which FSDP gathers all axes but the last.
    """
    if isinstance(shard, DTensor) and not isinstance(gathered, DTensor) and gathered.shape != shard.shape:
        mesh, placements = shard.device_mesh, shard.placements
        axis = mesh[(mesh.mesh_dim_names or ())[-1]]
        gathered = DTensor.from_local(
            gathered, axis, placements[-1:], run_check=False, shape=shard.shape, stride=shard.stride()
        )
    return gathered.full_tensor() if isinstance(gathered, DTensor) else gathered


class WithParts:
    """A view of a module for a function that reads it: `parts` replace its parameters and other attributes."""

    def __init__(self, module: nn.Module, parts: Mapping[str, Any]) -> None:
        self._module, self._parts = module, parts

    def __getattr__(self, name: str) -> Any:
        return self._parts[name] if name in self._parts else getattr(self._module, name)


def _copied_with_parts(module: nn.Module, parts: Mapping[str, Any]) -> nn.Module:
    """Return a module of the same class, whose `forward` may call that of its base, as Gemma's embedding does.

    torch compiles no such copy, so it is for modules outside of the layers.
    """
    found = object.__new__(type(module))
    found.__dict__ = {**module.__dict__, "_parameters": {**module._parameters, **parts}}
    return found


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; all of it if the tensor is replicated. Differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def _divide(module: nn.Module, mesh: DeviceMesh, style: _Style, substitute: Callable[..., object]) -> None:
    """Divide the parameters of a module on the meta device, and let it compute with its parts.

    Args:
        substitute: returns what takes the place of a module, and has the given parts.
    """
    divide_parameters(module, mesh, style.placement)
    setattr(module, _STYLE, style)
    module.summed = ()  # type: ignore[assignment]
    group = mesh.get_group()

    def forward(self: Any, first: Tensor, *others: Any, **options: Any) -> Tensor:
        parts, bias = self.parts, None
        if style.by_inputs and self.bias is not None:
            # Added once, and not to each of the outputs that are summed.
            bias = parts.get("bias", self.bias)
            parts = {**parts, "bias": None}
        compute: Any = type(self).forward
        output: Tensor = compute(substitute(self, parts) if parts else self, first, *others, **options)
        if style.by_inputs:
            output = sum_of_parts(output, group)
        return output if bias is None else output + bias

    module.forward = MethodType(forward, module)


def _sum_gradient_of_input(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradient of a block's first input, which all of its modules that are divided by outputs read.

    block: attention or MLP.
    """
    name = list(inspect.signature(type(block).forward).parameters)[1]
    # The block itself may be divided.
    compute: Callable[..., Any] = block.forward if _STYLE in vars(block) else MethodType(type(block).forward, block)

    def forward(_: nn.Module, *inputs: Any, **options: Any) -> Any:
        first, *others = (options.pop(name),) if name in options else inputs
        return compute(_equal_on_all(first, group), *others, **options)

    block.forward = MethodType(forward, block)


def _take_parts_before(unit: nn.Module, modules: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Let divided modules of `unit` take what replaces their parameters before each forward pass of `unit`.

    These are frozen DTensors that FSDP does not manage (`experts.ready_parameters`), and parameters whose gradients are
    summed. Outside of what is compiled: torch 2.13 cannot compile layers of DTensors for several lengths. A layer that
    is recomputed uses the parts of its last forward pass, which FSDP has filled again by then.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def take(*_: Any) -> None:
        with torch.no_grad():
            for module in modules:
                divided = {name: one for name, one in module._parameters.items() if isinstance(one, DTensor)}
                assert not any(one.requires_grad for one in divided.values()), "FSDP gathers plain tensors"
                module.parts = {name: local(one) for name, one in divided.items()}
        if not torch.is_grad_enabled():
            return
        summed = [(module, name) for module in modules for name in module.summed]
        trained = [(module, name) for module, name in summed if module._parameters[name].requires_grad]
        found = _with_summed_gradients([module._parameters[name] for module, name in trained], group)
        for (module, name), part in zip(trained, found, strict=True):
            module.parts[name] = part

    # FSDP puts its hook, which gathers the parameters, before all others.
    unit.register_forward_pre_hook(take)


class _EqualOnAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _WithSummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summed = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(summed, group=ctx.group)
        parts = torch.split(summed, [gradient.numel() for gradient in gradients])
        return None, *(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _equal_on_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that all ranks have; its gradients are summed over them (f of the paper's figure 3)."""
    found: Tensor = _EqualOnAll.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def _with_summed_gradients(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return tensors that all ranks have; their gradients are summed over the ranks in one message."""
    if not tensors:
        return ()
    found: tuple[Tensor, ...] = _WithSummedGradients.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return found


def sum_of_parts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' tensors; its gradient is the gradient of each (g of the paper's figure 3)."""
    found: Tensor = _SumOfParts.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found
