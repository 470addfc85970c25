"""Which layers of a model have adapters (`low_rank`), what these begin with, their names, and their folder.

Called by `model` after tensor parallelism has divided the layers and before FSDP shards them. B begins at 0, so the
model begins as it was, and with its adapters off it is that model again: the reference policy needs no copy. A is drawn
as peft draws it. The adapters' folder is in peft's format.

A layer is named by the last part of its name in HuggingFace checkpoints, for which the experts are linear layers too,
though transformers fuses their weights: `gate_proj` names that projection of all experts, of shared experts and of
dense layers. Lists of peft's `target_modules` have these names, and vLLM names adapters of experts as the folder does.
Checkpoints of gpt-oss have fused experts, so there `gate_up_proj` has one adapter, as in peft's `target_parameters`.
Refused: names of fused parameters that checkpoints do not have, because one adapter for gate and up is another model
than one for each of them.

    model.layers.0.self_attn.q_proj                  .lora_A, .lora_B           of a linear layer
    model.layers.0.mlp.experts.adapters.gate_up_proj.gate_proj.lora_A           of a projection in a fused parameter
    model.layers.0.mlp.experts.adapters.gate_up_proj.gate_up_proj.lora_A        of one that checkpoints have fused
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
EXPERTS_NDIM: Final = 3
"""Dimensions of a parameter of experts."""
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
    _check_targets(lora, known)
    for name, module in linear.items():
        if name.rpartition(".")[2] in targets:
            LoRALinear.of(module, lora)
    for owner, fused in experts.items():
        adapters = nn.ModuleDict()
        for parameter, projections in fused.items():
            if chosen := {name: rows for name, rows in projections.items() if name in targets}:
                weight = owner.get_parameter(parameter)
                adapters[parameter] = LoRAExperts(weight, chosen, lora, is_transposed=_is_transposed(owner))
        if adapters:
            owner.add_module(ADAPTERS, adapters)


def _check_targets(lora: LoRA, known: set[str]) -> None:
    """Check that the targets are layers that can have adapters; `known` are the names of those.

    Raises:
        ModelUnsupportedError: names the layers that can have adapters.
    """
    if unknown := set(lora.target_modules) - known:
        names = ", ".join(sorted(known))
        raise ModelUnsupportedError(
            f"lora.targetModules {sorted(unknown)} are no linear layers of the decoder layers: there are {names}. "
            "Name some of these, or remove the field for all of them"
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
    of_experts = (parameter.numel() for parameter in found if parameter.ndim == EXPERTS_NDIM)
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
            if parameter.ndim != EXPERTS_NDIM:
                # Biases have no adapters.
                continue
            key = name, tuple(parameter.shape)
            if key not in known:
                # All layers have the same ones.
                written = written_of(language_model, f"{names[module]}.{name}", key[1])
                known[key] = _projections(written, is_transposed=_is_transposed(module))
            fused[name] = known[key]
        yield module, fused


def _projections(written: Sequence[Written], *, is_transposed: bool) -> dict[str, range]:
    """Return the projections that a checkpoint has of a fused parameter, and which outputs of it they are."""
    if is_fused(written):
        (one,) = written
        return {_layer(one.name): range(one.shape[2 if is_transposed else 1])}
    return {_layer(one.name): range(one.first_row, one.first_row + one.shape[0]) for one in written if one.expert == 0}


def is_fused(written: Sequence[Written]) -> bool:
    """Whether checkpoints have the experts of a parameter in one tensor."""
    return len(written) == 1 and written[0].expert is None and len(written[0].shape) == EXPERTS_NDIM


def _is_transposed(experts: Any) -> bool:
    """Whether the experts' weights are [E, inputs, outputs]."""
    return bool(experts.is_transposed)


def _layer(name: str) -> str:
    """Return the last part of the name of a layer, from that of its weight: a fused parameter is its own layer."""
    return name.removesuffix(f".{_WEIGHT}").rpartition(".")[2]


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


def of_layers(
    name: str, whole: Tensor, written: Sequence[Written], adapted: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's matrix of each linear layer of a checkpoint that has one, with its name.

    That of a fused parameter is in the form of peft's `ParamWrapper`: A [E * rank, inputs] and B [outputs, rank * E],
    whose columns are those of all experts for a rank, and then for the next one.

    Args:
        name, whole: of the parameter in the model.
        written: the tensors that a checkpoint has of the weight to which it belongs.
        adapted: names of all weights with adapters, in the order of the model.
    """
    *_, projection, last = name.split(".")
    if is_fused(written):
        flat = whole.flatten(0, 1) if last == _A else whole.permute(1, 2, 0).flatten(1)
        yield f"{_wrapper(written[0].name, weight_of(name), adapted)}.{last}", flat
        return
    for one in written:
        if _layer(one.name) == projection:
            yield f"{one.name.rpartition('.')[0]}.{last}", whole if one.expert is None else whole[one.expert]


def _wrapper(written: str, weight: str, adapted: Sequence[str]) -> str:
    """Return the name of the module that peft wraps around that of a fused parameter; the last one's is outermost.

    Args:
        written, weight: the parameter's names in a checkpoint and in the model.
    """
    wrapped = [one for one in adapted if one.rpartition(".")[0] == weight.rpartition(".")[0]]
    return ".".join([written.rpartition(".")[0], *["base_layer"] * (len(wrapped) - 1 - wrapped.index(weight))])


@dataclass(frozen=True)
class AdapterFiles:
    """What an adapters' folder says of itself.

    base: path of the model that the adapters belong to. parameters: names in checkpoints of the fused parameters that
    have adapters.
    """

    lora: LoRA
    base: str
    parameters: Sequence[str] = ()

    def config(self, names: Iterable[str]) -> dict[str, object]:
        """Return peft's configuration; `names`: of the tensors."""
        modules = tuple({f"{one.rpartition('.')[0]}." for one in self.parameters})
        config: dict[str, object] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.split(".")[-2] for name in names if not name.startswith(modules)}),
            "inference_mode": True,
        }
        if self.parameters:
            # The same in all layers: mlp.experts.down_proj.
            config["target_parameters"] = sorted({".".join(one.split(".")[-3:]) for one in self.parameters})
        return config


def write_adapters(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[Tensor], files: AdapterFiles
) -> None:
    """Write adapters as peft's PeftModel.from_pretrained reads them: in one file, a tensor at a time.

    Args:
        shapes: of all tensors, by the names of `of_layers`.
        tensors: in the same order and in float32; each is on the host only while it is written.

    Raises:
        OSError: the storage refused a write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "adapter_model.safetensors"
    with file.open("wb") as stream:
        stream.write(_header({f"base_model.model.{name}.weight": shape for name, shape in shapes.items()}))
        for tensor in tensors:
            # A copy also of a tensor on the host, because the offloader could not release memory that NumPy knows.
            stream.write(tensor.contiguous().to("cpu", copy=True).numpy().data)
    durable.sync(file)
    (folder / "adapter_config.json").write_text(json.dumps(files.config(shapes), indent=1))


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
