"""A sharded model's weights, as the tensors of its family's checkpoints: `WeightSource` for a weight transfer.

Called by `WeightSender` and `export`. Names and shapes are those of the hub (`checkpoint_tensors`): vLLM's loaders know
them for every family. Tied parameters go once, under their first name, as in a HuggingFace checkpoint. Stored buffers,
such as the bias of a router's scores, go in their own dtype. A decoder layer is gathered at once by FSDP itself, with
those that it travels with in a forward pass: a message for each of its parameters costs more than their bytes. Of a
pipeline, each rank gathers its layers when it is their turn, and broadcasts them to the other ranks in one message a
layer: all ranks go through the whole model in the same order, so every rank may be a sender. Adapters are merged into
the weights that they belong to, in float32, so the rollout engine knows nothing of them; those of experts by the ranks
that have these experts (`expert_blocks`, or `_whole` where checkpoints have all experts in one tensor). All other
tensors of such a model are frozen, but for those that vLLM may fuse with an adapted one (`_frozen`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ppojob_trainer.engines.train.dims import SHARD
from ppojob_trainer.engines.train.fsdp.checkpoint_tensors import Written, written_of
from ppojob_trainer.engines.train.fsdp.expert_blocks import ExpertBlocks, in_blocks, is_large, rows_of
from ppojob_trainer.engines.train.fsdp.lora import EXPERTS_NDIM, is_adapter, is_fused, merged, of_layers, weight_of
from ppojob_trainer.engines.train.fsdp.stages import Part, Stage, stored_tensors
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local, whole_of
from ppojob_trainer.engines.weights.buckets import TensorSpec


class ShardedWeights:
    """See the module's docstring."""

    def __init__(
        self,
        language_model: PreTrainedModel,
        dtype: torch.dtype = torch.bfloat16,
        on_device: Callable[[], AbstractContextManager[None]] = nullcontext,
        stage: Stage | None = None,
    ) -> None:
        """Take the weights of `language_model`.

        Args:
            dtype: of the parameters that are sent; bfloat16 halves what float32 would cost.
            on_device: makes sure that the parameters are on the device while they are gathered.
            stage: of a model that is a pipeline stage.
        """
        self._language_model, self._dtype, self._on_device = language_model, dtype, on_device
        self._stage = stage
        self._buffers = frozenset(name for name, _ in language_model.named_buffers())

    def specs(self) -> list[TensorSpec]:
        """Return the tensors in the order of `gather`."""
        dtypes = {part.name: str(part.dtype or self._dtype).removeprefix("torch.") for part, _ in self._written}
        return [
            TensorSpec(one.name, one.shape, dtypes[part.name], is_frozen=part.name in self._frozen)
            for part, ones in self._written
            for one in ones
        ]

    def gather(self) -> Iterator[Tensor]:
        """See `WeightSource`. They are on the device."""
        return _written_out(self.gather_parameters())

    def gather_changing(self) -> Iterator[Tensor]:
        """See `PartlyFrozenSource`. They are on the device."""
        return _written_out(self.gather_parameters(self._frozen))

    @torch.no_grad()
    def gather_parameters(
        self, without: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Sequence[Written], Tensor, int]]:
        """Yield each parameter or block of experts that is gathered, with the tensors of a checkpoint that it has.

        The third value is the first expert of a block. `without`: names of parameters that are left out.
        """
        divided = self._in_blocks - without
        own = {name: tensor for name, tensor in self._own() if name in divided}
        blocks = ExpertBlocks(own, self._experts, self._dtype, self._device) if divided else None
        with self._on_device():
            wholes = self._gather_whole(self._in_blocks | without)
            for part, ones in self._written:
                if part.name in without:
                    continue
                if part.name in divided:
                    assert blocks is not None, "it has such parameters"
                    yield from blocks.gather(part.name, part.shape, ones)
                else:
                    yield ones, next(wholes), 0
            assert next(wholes, None) is None, "more is gathered than there are specs"

    @cached_property
    def _in_blocks(self) -> frozenset[str]:
        """The names of the parameters of the whole model that are gathered in blocks."""
        return frozenset(part.name for part, ones in self._written if self._is_in_blocks(part, ones))

    def _is_in_blocks(self, part: Part, written: Sequence[Written]) -> bool:
        """Whether a parameter is gathered in blocks: experts that are large or have adapters.

        Checkpoints have each of these experts by itself.
        """
        is_of_experts = all(one.expert is not None for one in written)
        return is_of_experts and (part.name in self._adapted or is_large(written, self._dtype))

    @cached_property
    def _frozen(self) -> frozenset[str]:
        """The names of the parameters of the whole model that training never changes; empty without adapters.

        A tensor beside an adapted one, in the same module of a checkpoint, counts as changing: vLLM fuses some of them
        into one layer (query, key and value), and a layer can only be reloaded as a whole.
        """
        if not self._adapted:
            return frozenset()
        changing = {_block(one.name) for part, ones in self._written if part.name in self._adapted for one in ones}
        return frozenset(
            part.name for part, ones in self._written if changing.isdisjoint(_block(one.name) for one in ones)
        )

    @cached_property
    def _adapted(self) -> frozenset[str]:
        """The names of the parameters of the whole model that have adapters."""
        return frozenset(weight_of(part.name) for part in self._adapters)

    @cached_property
    def _layers(self) -> dict[str, FSDPModule]:
        """The FSDP module that is gathered for each parameter and buffer, by the tensor's name."""
        layers = _layers(self._language_model)
        not_at_once = {layers[name] for name in self._in_blocks & layers.keys()}
        return {name: layer for name, layer in layers.items() if layer not in not_at_once}

    @property
    def _device(self) -> torch.device:
        return next(self._language_model.parameters()).device

    @cached_property
    def _written(self) -> list[tuple[Part, list[Written]]]:
        """The parameters and stored buffers of the whole model, each with the tensors that a checkpoint has of it."""
        if self._stage is not None:
            parts = [part for part in self._stage.parts if not is_adapter(part.name)]
        else:
            parts = [Part(name, tuple(one.shape), 0, _kept_dtype(one)) for name, one in self._own()]
        written = [(part, written_of(self._language_model, part.name, part.shape)) for part in parts]
        return [(part, in_blocks(ones) if self._is_in_blocks(part, ones) else ones) for part, ones in written]

    def _gather_whole(self, without: frozenset[str]) -> Iterator[Tensor]:
        """Yield each parameter and stored buffer of the whole model, but for some."""
        if self._stage is None:
            yield from self._gather_own(without)
            return
        parts = [part for part, _ in self._written if part.name not in without]
        for _, tensor in self._of_stages(self._stage, parts, self._gather_own(without), self._dtype):
            yield tensor

    def _gather_own(self, without: frozenset[str]) -> Iterator[Tensor]:
        """Yield the parameters and stored buffers that this rank's stage owns, but for some."""
        shards = dict(self._own())
        names = (name for name in shards if name not in without)
        with ExitStack() as gathered:
            for layer, group in groupby(names, self._layers.get):
                # A layer may have been gathered together with the previous one.
                if layer is not None and _is_sharded(layer):
                    gathered.close()
                    gathered.enter_context(_unsharded(layer))
                yield from (self._whole(name, shards[name]) for name in group)

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of `gather_adapters`, by name and in its order.

        Their names are those of the layers in a checkpoint, with lora_A or lora_B.
        """
        meta = ((part.name, torch.empty(part.shape, device="meta")) for part in self._adapters)
        return {name: tuple(tensor.shape) for name, tensor in self._of_layers(meta)}

    def adapted_parameters(self) -> list[str]:
        """Return the names of the fused parameters with adapters that are one tensor in a checkpoint, too."""
        return [ones[0].name for part, ones in self._written if part.name in self._adapted and is_fused(ones)]

    @torch.no_grad()
    def gather_adapters(self) -> Iterator[Tensor]:
        """Yield the adapters' matrices, whole, in float32, in the form of `lora.of_layers`. Collective.

        They are on the device.
        """
        named = self._language_model.named_parameters()
        own = ((name, _full(parameter.detach())) for name, parameter in named if is_adapter(name))
        with self._on_device():
            whole: Iterator[tuple[str, Tensor]] = own
            if self._stage is not None:
                tensors = (tensor for _, tensor in own)
                whole = self._of_stages(self._stage, self._adapters, tensors, torch.float32)
            for _, tensor in self._of_layers(whole):
                yield tensor

    def _of_layers(self, adapters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of the layers in a checkpoint, from the adapters' parameters with their names."""
        written = {part.name: ones for part, ones in self._written}
        adapted = [name for name in written if name in self._adapted]
        for name, tensor in adapters:
            yield from of_layers(name, tensor, written[weight_of(name)], adapted)

    @cached_property
    def _adapters(self) -> list[Part]:
        """The adapters' parameters of the whole model."""
        if self._stage is not None:
            return [part for part in self._stage.parts if is_adapter(part.name)]
        named = self._language_model.named_parameters()
        return [Part(name, tuple(parameter.shape), 0) for name, parameter in named if is_adapter(name)]

    def _of_stages(
        self, stage: Stage, parts: Sequence[Part], own: Iterator[Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all stages by name, in the order of `parts`; `own` are those of this stage."""
        device = self._device
        for owner, group in stage.together(parts):
            sizes = [math.prod(part.shape) for part in group]
            if owner == stage.peers.rank:
                flat = torch.cat([next(own).reshape(-1) for _ in group])
            else:
                flat = torch.empty(sum(sizes), dtype=group[0].dtype or dtype, device=device)
            stage.peers.broadcast(flat, owner)
            for part, tensor in zip(group, torch.split(flat, sizes), strict=True):
                yield part.name, tensor.view(part.shape)
        assert next(own, None) is None, "the stage has more parameters than it owns"

    def _whole(self, name: str, shard: Tensor) -> Tensor:
        if name in self._buffers:
            return self._language_model.get_buffer(name)
        parameter = self._language_model.get_parameter(name).detach()
        if name not in self._adapted:
            return whole_of(parameter.to(self._dtype), shard)
        if parameter.ndim < EXPERTS_NDIM:
            return merged(self._language_model, name, _full(parameter), self._dtype, _full)
        # Each rank merges the adapters of the experts that it has.
        own = self._experts(name, parameter, *rows_of(parameter))
        if not isinstance(parameter, DTensor):
            return own
        place = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            own, *place, run_check=False, shape=parameter.shape, stride=parameter.stride()
        ).full_tensor()

    def _experts(self, name: str, parameter: Tensor, first: int, number: int) -> Tensor:
        """Return some of the experts that this rank has of a parameter, in the dtype of the push."""

        def part(tensor: Tensor) -> Tensor:
            return local(tensor).narrow(0, first - rows_of(tensor)[0], number)

        return merged(self._language_model, name, part(parameter.detach()), self._dtype, part)

    def _own(self) -> list[tuple[str, Tensor]]:
        # A list, because gathering a layer replaces its shards by other parameters.
        copy = None if self._stage is None else self._stage.copy
        named = stored_tensors(self._language_model)
        return [(name, tensor) for name, tensor in named if not is_adapter(name) and name != copy]


@torch.no_grad()
def _written_out(gathered: Iterator[tuple[Sequence[Written], Tensor, int]]) -> Iterator[Tensor]:
    """Yield the tensors that a checkpoint has of gathered parameters."""
    for ones, whole, first_expert in gathered:
        for one in ones:
            yield one.of(whole, first_expert)


def _block(name: str) -> str:
    """Return the module of a checkpoint that a tensor's layer is in: `...self_attn` of `...self_attn.q_proj.weight`."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _kept_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of a buffer; None for a parameter, which is converted."""
    return None if isinstance(tensor, nn.Parameter) else tensor.dtype


def _layers(language_model: nn.Module) -> dict[str, FSDPModule]:
    """Return the FSDP module that must be gathered for each parameter and buffer, by the tensor's name.

    Empty for a model with adapters: FSDP would round them to the dtype of its computation.
    """
    found: dict[str, FSDPModule] = {}
    if any(is_adapter(name) for name, _ in language_model.named_parameters()):
        return found
    for prefix, module in language_model.named_modules():
        names = [f"{prefix}.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if isinstance(module, FSDPModule):
            # Divided experts are sharded by themselves, and gathered with their layer.
            found = dict.fromkeys(names, module) | found
    return found


def _is_sharded(layer: FSDPModule) -> bool:
    # With tensor parallelism a gathered parameter is still divided over the tensor-parallel axis.
    parts = (one for one in cast(nn.Module, layer).parameters() if isinstance(one, DTensor))
    return any(SHARD in (part.device_mesh.mesh_dim_names or ()) for part in parts)


@contextmanager
def _unsharded(layer: FSDPModule) -> Iterator[None]:
    parts = [part for part in cast(nn.Module, layer).modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def _full(shard: Tensor) -> Tensor:
    return shard.full_tensor() if isinstance(shard, DTensor) else shard
