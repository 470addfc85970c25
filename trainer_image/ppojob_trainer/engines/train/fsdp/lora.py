"""Low-rank adapters on frozen weights: LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1).

    y = x W^T + alpha / rank * x A^T B^T        A: [rank, inputs], B: [outputs, rank]

Called by `model` after tensor parallelism has divided the layers and before FSDP shards them. B begins at 0, so the
model begins as it was, and with its adapters off it is that model again: the reference policy needs no copy. A is drawn
as peft draws it. There is no dropout, because log-probs must be the same each time they are taken. The adapters' folder
is in peft's format.

On a tensor-parallel layer, A and B are divided as W is. Their product is added before the ranks' results are summed, so
no activation is communicated in addition. FSDP sums the gradient of the matrix that is whole over the tensor-parallel
ranks, once, when it reduces gradients, in the dtype in which the layer computes:

    W divided by outputs    A whole, B divided by outputs    gradient of A: each rank's outputs give a part
    W divided by inputs     A divided by inputs, B whole     gradient of B: each rank's inputs give a part
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.errors import ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp.experts import expert_modules

_A, _B, _WEIGHT = "lora_A", "lora_B", "weight"
# The matrices of an expert in checkpoints. Dense layers of the same model have some of these names, too.
_OF_EXPERTS: Final = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
ADAPTER_FOLDER: Final = "adapter"


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. Weight and bias keep their names, so checkpoints of the model fit."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    factor: float
    is_on: bool

    @staticmethod
    def of(linear: nn.Linear, lora: LoRA) -> LoRALinear:
        """Give a layer an adapter, which is not filled yet.

        It stays the same object, as with FSDP, because tensor parallelism has replaced its `forward`.
        """
        linear.__class__ = LoRALinear
        adapted = cast("LoRALinear", linear)
        adapted.lora_A = _empty(linear.weight, (lora.rank, linear.in_features), divided_dim=1)
        adapted.lora_B = _empty(linear.weight, (linear.out_features, lora.rank), divided_dim=0)
        adapted.factor, adapted.is_on = lora.alpha / lora.rank, True
        return adapted

    def forward(self, input: Tensor) -> Tensor:
        """Return y of the module's docstring."""
        output = functional.linear(input, self.weight, self.bias)
        if not self.is_on:
            return output
        return output + functional.linear(functional.linear(input, self.lora_A), self.lora_B) * self.factor


def _empty(weight: Tensor, shape: tuple[int, int], divided_dim: int) -> nn.Parameter:
    """Return a matrix of an adapter in float32, divided where the layer's weight is divided in the same dimension."""
    matrix = torch.empty(shape, dtype=torch.float32, device=weight.device)
    if isinstance(weight, DTensor):
        placements = [one if one == Shard(divided_dim) else Replicate() for one in weight.placements]
        # On the meta device there is nothing to send.
        matrix = distribute_tensor(matrix, weight.device_mesh, placements, src_data_rank=None)
    return nn.Parameter(matrix)


def add_adapters(layers: nn.Module, lora: LoRA) -> None:
    """Give the linear layers in `layers` adapters, which are not filled yet.

    Raises:
        ModelUnsupportedError: a target is not a linear layer of the model, or would be an expert.
    """
    linear = {name: module for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    known = {name.rpartition(".")[2] for name in linear}
    targets = set(lora.target_modules) or known
    _refuse_experts(layers, lora, known)
    if unknown := targets - known:
        raise ModelUnsupportedError(
            f"lora.targetModules {sorted(unknown)} are no linear layers of the decoder layers: "
            f"there are {', '.join(sorted(known))}"
        )
    for name, module in linear.items():
        if name.rpartition(".")[2] in targets:
            LoRALinear.of(module, lora)


def _refuse_experts(layers: nn.Module, lora: LoRA, known: set[str]) -> None:
    """Refuse targets that would include experts, because fused parameters have no adapters here.

    Raises:
        ModelUnsupportedError: it names the targets, the experts' parameters and the layers that remain.
    """
    experts = {name for _, part in expert_modules(layers) for name, _ in part.named_parameters(recurse=False)}
    targets = set(lora.target_modules)
    included = targets & (_OF_EXPERTS | experts)
    if not experts or (targets and not included):
        return
    what = f"lora.targetModules {sorted(included)} include" if targets else "lora without targetModules includes"
    raise ModelUnsupportedError(
        f"{what} experts, which can have no adapters here ({', '.join(sorted(experts))} are fused): set "
        f"lora.targetModules to some of {', '.join(sorted(known - _OF_EXPERTS))}"
    )


def initial_adapters(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the initial full A and B of all adapters, by their names in `module`."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if name.endswith(f".{_A}"):
            empty = torch.empty(parameter.shape)
            found[name] = nn.init.kaiming_uniform_(empty, a=math.sqrt(5), generator=generator)
        elif name.endswith(f".{_B}"):
            found[name] = torch.zeros(parameter.shape)
    return found


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute without adapters, as the model was before training."""
    adapted = [part for part in module.modules() if isinstance(part, LoRALinear)]
    for part in adapted:
        part.is_on = False
    try:
        yield
    finally:
        for part in adapted:
            part.is_on = True


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in (_A, _B)


def weight_of(name: str) -> str:
    """Return the name of the frozen weight to which an adapter's parameter belongs."""
    return f"{name.rpartition('.')[0]}.{_WEIGHT}"


def adapter_of(language_model: nn.Module, name: str) -> LoRALinear | None:
    """Return the layer whose frozen weight has this name, or None where it has no adapter."""
    owner, _, last = name.rpartition(".")
    layer = language_model.get_submodule(owner)
    return layer if last == _WEIGHT and isinstance(layer, LoRALinear) else None


def merge(weight: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
    """Return W + factor * B A in float32; down is A, up is B."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=factor)


def write_adapters(folder: Path, whole: Mapping[str, Tensor], lora: LoRA, base: str) -> None:
    """Write adapters as peft's PeftModel.from_pretrained reads them.

    Args:
        whole: their tensors, by their names in the model.
        base: path of the model that they belong to.
    """
    adapters = {f"base_model.model.{name}.weight": tensor for name, tensor in whole.items()}
    targets = sorted({name.split(".")[-3] for name in adapters})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in adapters.items()}, file)
    # safetensors writes files with mode 0600, but another user may serve the model.
    file.chmod(0o644)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
