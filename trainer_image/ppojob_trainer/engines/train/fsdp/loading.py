"""Builds models without memory and reads their weights: each rank reads its own slices of the checkpoint's files.

    without_memory      parameters on the meta device, buffers as the model's code computes them
    (the caller)        divides and shards the module
    allocate            memory for this rank's shards only, on its device
    load_weights        reads them

Called by `model` and `reward`. Names are those of transformers' loader: it has renamed and fused the weights of some
families since their checkpoints were written (`transformers.core_model_loading`). A renamed tensor is read by slices. A
tensor that transformers computes from several others, such as the experts of a layer, is computed whole and sliced; of
experts that a rank has no part of, nothing is read. No rank waits for another. It refuses checkpoints that lack a
parameter, and shapes that differ: transformers would draw those weights at random.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final
from zipfile import is_zipfile

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ppojob_trainer.engines.errors import ModelNotFoundError
from ppojob_trainer.engines.train.fsdp.lora import is_adapter
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local

__all__ = [
    "Conversions",
    "Weights",
    "allocate",
    "find_tensors",
    "load_weights",
    "open_weights",
    "without_memory",
    "write_shard",
]

_FORMATS: Final = ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME))

Weights = Mapping[str, Any]
"""Tensors of a checkpoint by name. They are read when they are indexed: `weights[name][first:last]`."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Build modules whose parameters are on the meta device. Tie weights afterwards: here each gets its own parameter.

    Buffers are computed as usual, because no checkpoint has some of them, such as the frequencies of rotary embeddings.
    """
    with no_init_weights(), init_empty_weights(include_buffers=False):
        yield


class Conversions:
    """How transformers turns the names and tensors of a family's checkpoints into those of a model.

    Take it before FSDP changes the classes of the model's modules.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._prefix = model.base_model_prefix

    def target(self, name: str, targets: dict[str, Tensor]) -> tuple[str, str | None]:
        """Return a tensor's name in the model, and the pattern of its converter if it has one."""
        found: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._prefix, targets
        )
        if found[0] not in targets and name in targets:
            # It is in the model's own form already.
            return name, None
        return found

    def converter(self, pattern: str) -> WeightConverter:
        """Return a new converter for the tensors of this pattern."""
        found = next(one for one in self._converters if pattern in one.source_patterns)
        return deepcopy(found)


@contextmanager
def open_weights(path: str, field: str = "model path") -> Iterator[Weights]:
    """Open the weights of a HuggingFace folder, safetensors or else PyTorch's files, without reading them.

    Args:
        field: what names the path in the error.

    Raises:
        ModelNotFoundError: there are none that can be read, also if that is found while the block reads them.
    """
    with ExitStack() as opened:
        try:
            found: dict[str, Any] = {}
            for file in _files(Path(path)):
                found |= _tensors(file, opened)
            yield found
        # No RuntimeError: a device that runs out of memory says nothing about the files.
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelNotFoundError(f"{field} {path} holds no weights that can be read: {error}") from error


def find_tensors(path: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Return those of some tensors that any safetensors file of a folder has; the file need not be in the index."""
    found: dict[str, Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            present = set(tensors.keys())
            found |= {name: tensors.get_tensor(name) for name in names if name in present}
    return found


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give a sharded module's parameters memory for this rank's shards, and move the buffers to the device."""
    tied: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            tied[parameter].append((part, name))
    # As `nn.Module.to_empty` does, which would empty the buffers too.
    module._apply(partial(_allocated, device))  # type: ignore[no-untyped-call]
    # Parameters that FSDP does not manage are replaced, one for each name.
    for (first, name), *others in tied.values():
        for part, other in others:
            part.register_parameter(other, first.get_parameter(name))


def load_weights(
    model: PreTrainedModel, weights: Weights, conversions: Conversions, aliases: Mapping[str, str] | None = None
) -> list[str]:
    """Read this rank's shards of all parameters and stored buffers, adapters excepted.

    Args:
        aliases: names of tied parameters that the model lacks -> those that it has, see `stages`.

    Returns:
        The names of parameters that the checkpoint does not have.

    Raises:
        ValueError: a tensor has another shape than the model's.
    """
    targets: dict[str, Tensor] = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: set[int] = set()

    def write(name: str, source: Any) -> None:
        write_shard(targets[name], source, name)
        if name in parameters:
            found.add(id(parameters[name]))

    computed: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    for name in sorted(weights, key=dot_natural_key):
        target, pattern = conversions.target(name, targets)
        target = (aliases or {}).get(target, target)
        if target not in targets:
            continue
        if pattern is None:
            write(target, weights[name])
            continue
        if target not in computed:
            computed[target] = (conversions.converter(pattern), [])
        computed[target][1].append((name, pattern))
    for target, (converter, sources) in computed.items():
        for name, tensor in _convert(model, converter, target, targets[target], weights, sources):
            write(name, tensor)
    names = {id(parameter): name for name, parameter in reversed(parameters.items()) if not is_adapter(name)}
    return [name for number, name in names.items() if number not in found]


def write_shard(target: Tensor, source: Any, name: str) -> None:
    """Copy this rank's part of a whole tensor, or of one in a file, into the model's.

    Raises:
        ValueError: the shapes differ.
    """
    mine = local(target)
    part: Tensor | None
    if isinstance(source, _Local):
        shape, expected, part = tuple(source.tensor.shape), tuple(mine.shape), source.tensor
    else:
        shape = tuple(source.shape if isinstance(source, Tensor) else source.get_shape())
        expected = tuple(target.shape)
        part = source[_slices(target)] if shape == expected and mine.numel() else None
    if shape != expected:
        raise ValueError(f"{name} has the shape {list(shape)}, and the model's configuration {list(expected)}")
    if part is not None:
        with torch.no_grad():
            # To the device in the file's dtype, which is mostly smaller.
            mine.copy_(part.to(mine.device))


class _Local:
    """A tensor that is already this rank's part."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _allocated(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _files(folder: Path) -> list[Path]:
    """Return the files of weights as transformers chooses them."""
    for single, index in _FORMATS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            named = json.loads((folder / index).read_text())["weight_map"].values()
            return [folder / name for name in sorted(set(named))]
    raise FileNotFoundError(f"it has none of {', '.join(name for names in _FORMATS for name in names)}")


def _tensors(file: Path, opened: ExitStack) -> Weights:
    if file.suffix != ".safetensors":
        try:
            # torch can map only its newer format, which is a zip file.
            loaded: Weights = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(f"{file.name}: {error}") from error
        return loaded
    tensors: Any = opened.enter_context(safe_open(file, framework="pt"))
    return {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it is no mapping


def _slices(target: Tensor) -> tuple[slice, ...]:
    """Return which part of a whole tensor this rank has."""
    if not isinstance(target, DTensor):
        return tuple(slice(0, size) for size in target.shape)
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def _experts_are_local(converter: WeightConverter, target: Tensor) -> bool:
    """Whether each expert of a converted tensor is computed from its own tensors, and ranks divide whole experts."""
    first, *others = converter.operations
    is_stacked = isinstance(first, MergeModulelist) and first.dim == 0
    keeps_experts = all(isinstance(one, Concatenate) and one.dim != 0 for one in others)
    slices = _slices(target)[1:]
    has_whole_experts = all(part == slice(0, size) for part, size in zip(slices, target.shape[1:], strict=True))
    return is_stacked and keeps_experts and has_whole_experts and len(converter.target_patterns) == 1


def _convert(
    model: PreTrainedModel,
    converter: WeightConverter,
    name: str,
    target: Tensor,
    weights: Weights,
    sources: list[tuple[str, str]],
) -> Iterator[tuple[str, Tensor | _Local]]:
    """Yield the tensors that a converter computes, by their names; of experts those of this rank alone.

    Args:
        name, target: the tensor in the model that is computed, or the first of several.
        sources: the names of the tensors that it is computed from, each with its pattern.
    """
    is_local = _experts_are_local(converter, target)
    if is_local and not local(target).numel():
        yield name, _Local(local(target))
        return
    by_pattern: dict[str, list[str]] = {}
    for source, pattern in sources:
        by_pattern.setdefault(pattern, []).append(source)
    for pattern, stacked in by_pattern.items():
        if is_local and len(stacked) != target.shape[0]:
            raise ValueError(f"{name} has {target.shape[0]} experts, and the checkpoint {len(stacked)}")
        for source in stacked[_slices(target)[0]] if is_local else stacked:
            # Read one after the other when the converter runs.
            reading: Any = partial(_whole, weights, source)
            converter.add_tensor(name, source, pattern, reading)
    for found, tensors in converter.convert(name, model=model, config=model.config).items():
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        yield found, _Local(tensor) if is_local else tensor


def _whole(weights: Weights, name: str) -> Tensor:
    found: Tensor = weights[name][...]
    return found
