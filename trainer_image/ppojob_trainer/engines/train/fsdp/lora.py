"""Which layers of a model have adapters (`low_rank`), what these begin with, their names, and their folder.

Called by `model` after tensor parallelism has divided the layers and before FSDP shards them. B begins at 0, so the
model begins as it was, and with its adapters off it is that model again: the reference policy needs no copy. A is drawn
as peft draws it. The adapters' folder is in peft's format.

A layer is named by the last part of its name in HuggingFace checkpoints, for which the experts are linear layers too,
though transformers fuses their weights: `gate_proj` names that projection of all experts, of shared experts and of
dense layers. Lists of peft's `target_modules` have these names, and vLLM names adapters of experts as the folder does.
Refused: the names of transformers' fused parameters, as in peft's `target_parameters`, because one adapter for gate and
up is another model than one for each of them.

    model.layers.0.self_attn.q_proj                  .lora_A, .lora_B      of a linear layer
    model.layers.0.mlp.experts.adapters.gate_up_proj.gate_proj.lora_A      of a projection in a fused parameter
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.checkpoints import durable
from ppojob_trainer.engines.errors import ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp.checkpoint_tensors import Written, written_of
from ppojob_trainer.engines.train.fsdp.experts import expert_modules
from ppojob_trainer.engines.train.fsdp.grouped_experts import ADAPTERS
from ppojob_trainer.engines.train.fsdp.low_rank import LoRAExperts, LoRALinear, merge
from ppojob_trainer.maths.rounding import round_stochastically

_A, _B, _WEIGHT = "lora_A", "lora_B", "weight"
ADAPTER_FOLDER: Final = "adapter"


def add_adapters(language_model: PreTrainedModel, layers: nn.Module, lora: LoRA) -> None:
    """Give the linear layers in `layers`, and those of the experts, adapters, which are not filled yet.

    Args:
        layers: the decoder layers of `language_model`.

    Raises:
        ModelUnsupportedError: a target is not a linear layer of the model.
    """
    linear = {name: module for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    experts = dict(_experts(language_model, layers))
    of_experts = {name for fused in experts.values() for projections in fused.values() for name in projections}
    known = {name.rpartition(".")[2] for name in linear} | of_experts
    targets = set(lora.target_modules) or known
    _check_targets(language_model.config.model_type, lora, known, has_others=any(one.is_transposed for one in experts))
    for name, module in linear.items():
        if name.rpartition(".")[2] in targets:
            LoRALinear.of(module, lora)
    for owner, fused in experts.items():
        adapters = nn.ModuleDict()
        for parameter, projections in fused.items():
            if chosen := {name: rows for name, rows in projections.items() if name in targets}:
                adapters[parameter] = LoRAExperts(owner.get_parameter(parameter), chosen, lora)
        if adapters:
            owner.add_module(ADAPTERS, adapters)


def _check_targets(family: str, lora: LoRA, known: set[str], *, has_others: bool) -> None:
    """Check that the targets are layers that can have adapters.

    Args:
        known: the names of those layers.
        has_others: the model has experts that cannot have adapters. Without targets, they would be left out in silence.

    Raises:
        ModelUnsupportedError: names the layers that can have adapters.
    """
    names = ", ".join(sorted(known))
    if unknown := set(lora.target_modules) - known:
        remedy = "Name some of these" if has_others else "Name some of these, or remove the field for all of them"
        raise ModelUnsupportedError(
            f"lora.targetModules {sorted(unknown)} are no linear layers of the decoder layers: there are {names}. "
            f"{remedy}"
        )
    if has_others and not lora.target_modules:
        raise ModelUnsupportedError(
            f"lora without targetModules is for all linear layers, and experts of {family} cannot have adapters: set "
            f"lora.targetModules to some of {names}"
        )


def count_parameters(language_model: PreTrainedModel, lora: LoRA) -> tuple[int, int]:
    """Return how many parameters the adapters of a model would have, and how many of them those of experts.

    The model gets them, without values.

    Raises:
        ModelUnsupportedError: a target is not a linear layer of the model.
    """
    layers = getattr(language_model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        # It is refused when it is built.
        return 0, 0
    add_adapters(language_model, layers, lora)
    found = [parameter for name, parameter in layers.named_parameters() if is_adapter(name)]
    of_experts = (parameter.numel() for parameter in found if parameter.ndim == 3)
    return sum(parameter.numel() for parameter in found), sum(of_experts)


def _experts(
    language_model: PreTrainedModel, layers: nn.Module
) -> Iterator[tuple[nn.Module, dict[str, dict[str, range]]]]:
    """Yield each layer's experts with their parameters by name: the projections in each, and which outputs they are."""
    names = {module: name for name, module in language_model.named_modules()}
    known: dict[tuple[str, tuple[int, ...]], dict[str, range]] = {}
    for _, module in expert_modules(layers):
        fused: dict[str, dict[str, range]] = {}
        for name, parameter in module.named_parameters(recurse=False):
            key = name, tuple(parameter.shape)
            if key not in known:
                # All layers have the same ones.
                written = written_of(language_model, f"{names[module]}.{name}", key[1])
                known[key] = {
                    _layer(one.name): range(one.first_row, one.first_row + one.shape[0])
                    for one in written
                    if one.expert == 0
                }
            fused[name] = known[key]
        yield module, fused


def _layer(name: str) -> str:
    """Return the last part of the name of a layer, from that of its weight."""
    return name.rpartition(".")[0].rpartition(".")[2]


def initial_adapters(module: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial full A and B of all adapters with their names in `module`, one at a time in float32.

    Those of experts may be too large to hold all of them on each rank.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith(f".{_A}"):
            # Of experts [E, rank, inputs], each with the same bound as a separate layer.
            drawn = torch.empty(parameter.shape).flatten(0, -2)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            yield name, drawn.view(parameter.shape)
        elif name.endswith(f".{_B}"):
            yield name, torch.zeros(parameter.shape)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute without adapters, as the model was before training."""
    adapted = [part for part in module.modules() if isinstance(part, LoRALinear | LoRAExperts)]
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
    experts, found, of_parameter = name.partition(f".{ADAPTERS}.")
    return f"{experts}.{of_parameter.partition('.')[0]}" if found else f"{name.rpartition('.')[0]}.{_WEIGHT}"


def merged(
    language_model: nn.Module, name: str, weight: Tensor, dtype: torch.dtype, whole: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a weight with its adapter merged into it, in `dtype`; without an adapter the weight itself in `dtype`.

    Args:
        name: of the parameter in the model.
        weight: all of it, or some of its experts.
        whole: returns as much of an adapter's parameter.
    """
    owner, _, last = name.rpartition(".")
    layer = language_model.get_submodule(owner)
    if isinstance(layer, LoRALinear) and last == _WEIGHT:
        down, up = whole(layer.lora_A.detach()), whole(layer.lora_B.detach())
        # The nearest bfloat16 of a weight with a small adapter is the weight without it.
        return round_stochastically(merge(weight, down, up, layer.factor), dtype)
    adapters = getattr(layer, ADAPTERS, None)
    if isinstance(adapters, nn.ModuleDict) and last in adapters:
        of_experts = adapters[last]
        assert isinstance(of_experts, LoRAExperts)
        return of_experts.merge_into(weight, dtype, whole)
    return weight.to(dtype)


def of_layers(name: str, whole: Tensor, written: Sequence[Written]) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's matrix of each linear layer of a checkpoint that has one, with its name.

    Args:
        name, whole: of the parameter in the model.
        written: the tensors that a checkpoint has of the weight to which it belongs.
    """
    *_, projection, last = name.split(".")
    for one in written:
        if _layer(one.name) == projection:
            yield f"{one.name.rpartition('.')[0]}.{last}", whole if one.expert is None else whole[one.expert]


def write_adapters(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[Tensor], lora: LoRA, base: str
) -> None:
    """Write adapters as peft's PeftModel.from_pretrained reads them: in one file, a tensor at a time.

    Args:
        shapes: of all tensors, by the names of `of_layers`.
        tensors: in the same order and in float32; each is on the host only while it is written.
        base: path of the model that they belong to.

    Raises:
        OSError: the storage refused a write.
    """
    targets = sorted({name.split(".")[-2] for name in shapes})
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
    with file.open("wb") as stream:
        stream.write(_header({f"base_model.model.{name}.weight": shape for name, shape in shapes.items()}))
        for tensor in tensors:
            # A copy also of a tensor on the host, because the offloader could not release memory that NumPy knows.
            stream.write(tensor.contiguous().to("cpu", copy=True).numpy().data)
    durable.sync(file)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return what a safetensors file has before its tensors, which are in this order and in float32.

    That is the length of a JSON object in 8 bytes, and the object, filled up with spaces to a multiple of 8 bytes. The
    library `safetensors` writes only tensors that are all in memory.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * torch.float32.itemsize
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
