"""Divides a decoder into pipeline stages: a rank keeps its layers, and modules without parameters replace the others.

    stage 0            embedding, its layers
    others             their layers
    the last stage     its layers, the final norm, and the output layer or the value head

A rank with several stages has the layers of all of them in one model, and computes one stage at a time (`computing`).
Called by `model` while a model is built without memory, so no rank reads another stage's weights. All modules keep
their names, so checkpoints, weights and exports have those of the whole model. transformers' own forward pass calls
the remaining modules: a later stage gives it the previous stage's hidden states in place of embedded tokens.

A tied embedding is a parameter of the first and of the last rank. Both add the other's gradient (`sum_tied_gradients`),
so they make the same steps and stay equal in every bit. Norm and optimizer state count it once, under the embedding's
name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppojob_trainer.engines.errors import ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.engines.train.pipeline import PipelinePeers

__all__ = [
    "Elsewhere",
    "Part",
    "Stage",
    "computing",
    "cut",
    "layer_number",
    "layers_of_stage",
    "parameters_of_stages",
    "parts_of",
    "stored_tensors",
    "sum_tied_gradients",
]

_LAYER: Final = re.compile(r"(?:^|.*?\.)layers\.(\d+)\.")


class Elsewhere(nn.Module):
    """Takes the place of a layer or a norm that another stage computes: the hidden states pass through."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states."""
        return hidden


@dataclass(frozen=True)
class Part:
    """A parameter or a stored buffer of the whole model, and the rank of the pipeline that has it.

    A tied parameter is rank 0's. dtype: of a buffer, which keeps it; None: it is a parameter.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    dtype: torch.dtype | None = None

    @property
    def layer(self) -> str | None:
        """The path of its decoder layer; None if it is outside the layers."""
        found = _LAYER.match(self.name)
        return found[0] if found else None

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Stage:
    """What a rank has of a pipeline, one or several stages.

    parts: the parameters and stored buffers of the whole model in order, tied ones once, with those of adapters. tied:
    the names of the embedding's and of the output layer's weight if they are one parameter.
    """

    peers: PipelinePeers
    parts: tuple[Part, ...]
    tied: tuple[str, str] | None = None

    @cached_property
    def copy(self) -> str | None:
        """The name of a tied weight on the last rank, which is the copy of rank 0's."""
        return self.tied[1] if self.tied is not None and self.peers.is_last else None

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """The tied weight's name that this rank does not have -> the one that it has."""
        if self.tied is None or not (self.peers.is_first or self.peers.is_last):
            return {}
        embedding, output = self.tied
        return {embedding: output} if self.peers.is_last else {output: embedding}

    def together(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[Part]]]:
        """Yield the rank and parts of each layer, which are sent in one message; other parts and buffers apart."""

        def key(part: Part) -> tuple[int, str, torch.dtype | None]:
            return part.rank, part.layer or part.name, part.dtype

        for (rank, *_), group in groupby(parts, key):
            yield rank, list(group)


def layer_number(name: str) -> int | None:
    """Return the number of the decoder layer of a parameter or module by its path; None if it is outside of them."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the numbers of a stage's layers. The later stages have fewer: the last one has the output layer, too."""
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model, tied ones once, and those buffers that its checkpoints have, in their order."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        stored = {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *stored.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def parts_of(language_model: PreTrainedModel, num_layers: int, size: int, virtual: int) -> tuple[Part, ...]:
    """Return the parameters and stored buffers of a whole model, divided over `size` ranks of `virtual` stages each."""
    number = size * virtual
    rank_of = {layer: stage % size for stage in range(number) for layer in layers_of_stage(num_layers, stage, number)}
    embedding = {id(parameter) for parameter in _embedding(language_model).parameters()}
    found = []
    for name, tensor in stored_tensors(language_model):
        layer = layer_number(name)
        outside = 0 if id(tensor) in embedding else size - 1
        dtype = None if isinstance(tensor, nn.Parameter) else tensor.dtype
        found.append(Part(name, tuple(tensor.shape), outside if layer is None else rank_of[layer], dtype))
    return tuple(found)


def parameters_of_stages(language_model: PreTrainedModel, size: int, virtual: int) -> tuple[int, ...]:
    """Return how many parameters each of `size` ranks of `virtual` stages has; of a tied embedding both ends have one.

    Args:
        language_model: the whole one.
    """
    counts = [0] * size
    num_layers = len(language_model.base_model.get_submodule("layers"))  # type: ignore[arg-type]
    for part in parts_of(language_model, num_layers, size, virtual):
        counts[part.rank] += part.numel if part.dtype is None else 0
    if size > 1 and _tied(language_model) is not None:
        counts[-1] += _embedding(language_model).get_parameter("weight").numel()
    return tuple(counts)


def cut(language_model: PreTrainedModel, backbone: nn.Module, parts: tuple[Part, ...], peers: PipelinePeers) -> Stage:
    """Remove from a whole model what other ranks have; it holds this decoder, and may be the decoder itself.

    Args:
        parts: of the whole model, with adapters.

    Raises:
        ModelUnsupportedError: it stores buffers outside its layers, whose stage is unknown.
    """
    if stored := [part.name for part in parts if part.dtype is not None and part.layer is None]:
        raise ModelUnsupportedError(
            f"{language_model.config.model_type} stores buffers outside its layers ({', '.join(stored[:4])}), which "
            "pipeline stages do not support: set pipelineParallelSize to 1"
        )
    tied = _tied(language_model)
    embedding, output = _embedding(language_model), language_model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = backbone.get_submodule("layers")
    children = list(layers.named_children())
    mine = {layer for stage in peers.stages for layer in layers_of_stage(len(children), stage, peers.num_stages)}
    for name, layer in children:
        if int(name) not in mine:
            _replace(language_model, layer)
    for _, child in _with_parameters(backbone):
        is_mine = peers.is_first if child is embedding else peers.is_last
        if child is not layers and not is_mine:
            _replace(language_model, child)
    if output is not None and not peers.is_last:
        _replace(language_model, output)
    return Stage(peers, parts, tied)


@contextmanager
def computing(backbone: nn.Module, peers: PipelinePeers, stage: int) -> Iterator[None]:
    """Let a rank's decoder compute one of its stages inside: hidden states pass through its other layers.

    FSDP's hooks are those of the layers, so only the layers of the stage are gathered.
    """
    layers, kept = backbone.get_submodule("layers"), [backbone.get_submodule("layers"), _embedding(backbone)]
    mine = layers_of_stage(len(list(layers.children())), stage, peers.num_stages)
    others = [(layers, name, layer) for name, layer in layers.named_children() if int(name) not in mine]
    if stage < peers.num_stages - 1:
        others += [(backbone, name, child) for name, child in _with_parameters(backbone) if child not in kept]
    for owner, name, _ in others:
        setattr(owner, name, Elsewhere())
    try:
        yield
    finally:
        for owner, name, module in others:
            setattr(owner, name, module)


def sum_tied_gradients(language_model: nn.Module, stage: Stage | None) -> None:
    """Add the other rank's gradient of a tied weight, on the first and on the last rank.

    Called when no parameter is gathered: FSDP's gradients are those of the shards.
    """
    if stage is None or stage.tied is None or not (stage.peers.is_first or stage.peers.is_last):
        return
    weight = language_model.get_parameter(stage.tied[stage.peers.is_last])
    if not weight.requires_grad:
        return
    assert weight.grad is not None, "both ranks compute with a tied weight, so both have a gradient"
    mine = local(weight.grad)
    with torch.no_grad():
        # The sum of two numbers does not depend on their order, so both ranks have the same one.
        mine.add_(stage.peers.of_other_end(mine.contiguous()))


def _with_parameters(backbone: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of a decoder that have parameters; rotary embeddings have none."""
    return [(name, child) for name, child in backbone.named_children() if any(True for _ in child.parameters())]


def _tied(language_model: PreTrainedModel) -> tuple[str, str] | None:
    output = language_model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = _embedding(language_model)
    if output is None or output.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in language_model.named_modules()}
    return f"{names[id(embedding)]}.weight", f"{names[id(output)]}.weight"


def _embedding(language_model: nn.Module) -> nn.Module:
    found: nn.Module = language_model.get_input_embeddings()  # type: ignore[operator]
    return found


def _replace(root: nn.Module, module: nn.Module) -> None:
    name = next(name for name, part in root.named_modules() if part is module)
    owner, _, last = name.rpartition(".")
    setattr(root.get_submodule(owner), last, Elsewhere())
