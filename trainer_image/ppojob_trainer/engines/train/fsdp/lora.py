"""Low-rank adapters on frozen weights: LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1).

    y = x W^T + alpha / rank * x A^T B^T        A: [rank, inputs], B: [outputs, rank]

Called by `model` before it shards. B begins at 0, so the model begins as it was, and with its adapters off it is that
model again: the reference policy needs no copy. A is drawn as peft draws it. There is no dropout, because log-probs
must be the same each time they are taken. The adapters' folder is in peft's format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
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

    def __init__(self, linear: nn.Linear, lora: LoRA) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        in_float32: dict[str, Any] = {"dtype": torch.float32, "device": linear.weight.device}
        self.lora_A = nn.Parameter(torch.empty(lora.rank, linear.in_features, **in_float32))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, lora.rank, **in_float32))
        self.factor = lora.alpha / lora.rank
        self.is_on = True

    def forward(self, input: Tensor) -> Tensor:
        """Return y of the module's docstring."""
        output = functional.linear(input, self.weight, self.bias)
        if not self.is_on:
            return output
        return output + functional.linear(functional.linear(input, self.lora_A), self.lora_B) * self.factor


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
        parent, _, last = name.rpartition(".")
        if last in targets:
            setattr(layers.get_submodule(parent), last, LoRALinear(module, lora))


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
    save_file({name: tensor.contiguous() for name, tensor in adapters.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
