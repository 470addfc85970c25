"""A sharded model's parameters, whole and under HuggingFace's names: `WeightSource` for a weight transfer.

Called by `WeightSender`. Tied parameters go once, under their first name, as in a HuggingFace checkpoint. A decoder
layer is gathered at once by FSDP itself, with those that it travels with in a forward pass: a message for each of its
parameters costs more than their bytes. Adapters are merged into the weights that they belong to, in float32, so the
rollout engine knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ppojob_trainer.engines.train.fsdp.lora import adapter_of, is_adapter, merge
from ppojob_trainer.engines.train.mesh import SHARD
from ppojob_trainer.engines.weights.buckets import TensorSpec


class ShardedWeights:
    """See the module's docstring."""

    def __init__(
        self,
        language_model: nn.Module,
        dtype: torch.dtype = torch.bfloat16,
        on_device: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take the parameters of `language_model`.

        Args:
            dtype: what is sent; bfloat16 halves what float32 would cost.
            on_device: makes sure that the parameters are on the device while they are gathered.
        """
        self._language_model, self._dtype, self._on_device = language_model, dtype, on_device
        self._layers = _layers(language_model)

    def specs(self) -> list[TensorSpec]:
        """Return the parameters in the order of `gather`."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [TensorSpec(name, tuple(parameter.shape), dtype) for name, parameter in self._parameters()]

    @torch.no_grad()
    def gather(self) -> Iterator[Tensor]:
        """See `WeightSource`. They are on the device."""
        names = (name for name, _ in self._parameters())
        with self._on_device(), ExitStack() as gathered:
            for layer, group in groupby(names, self._layers.get):
                # A layer may have been gathered together with the previous one.
                if layer is not None and _is_sharded(layer):
                    gathered.close()
                    gathered.enter_context(_unsharded(layer))
                yield from map(self._whole, group)

    @torch.no_grad()
    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' parameters, whole, in float32, under their names. Collective."""
        with self._on_device():
            for name, parameter in self._language_model.named_parameters():
                if is_adapter(name):
                    yield name, _full(parameter.detach())

    def _whole(self, name: str) -> Tensor:
        parameter = self._language_model.get_parameter(name).detach()
        adapted = adapter_of(self._language_model, name)
        if adapted is None:
            return _full(parameter.to(self._dtype))
        weight, down, up = (_full(part.detach()) for part in (parameter, adapted.lora_A, adapted.lora_B))
        return merge(weight, down, up, adapted.factor).to(self._dtype)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        # A list, because gathering a layer replaces its shards by other parameters.
        named = list(self._language_model.named_parameters())
        return ((name, parameter) for name, parameter in named if not is_adapter(name))


def _layers(language_model: nn.Module) -> dict[str, FSDPModule]:
    """Return which layer to gather for a parameter; none where there are adapters, which FSDP would round."""
    found: dict[str, FSDPModule] = {}
    if any(is_adapter(name) for name, _ in language_model.named_parameters()):
        return found
    for prefix, module in language_model.named_modules():
        names = [f"{prefix}.{name}" for name, _ in module.named_parameters()]
        if isinstance(module, FSDPModule):
            found |= dict.fromkeys(names, module)
    return found


def _is_sharded(layer: FSDPModule) -> bool:
    # With tensor parallelism a gathered parameter is still divided over the tensor-parallel axis.
    parts = (one for one in cast(nn.Module, layer).parameters() if isinstance(one, DTensor))
    return any(SHARD in (part.device_mesh.mesh_dim_names or ()) for part in parts)


@contextmanager
def _unsharded(layer: FSDPModule) -> Iterator[None]:
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def _full(shard: Tensor) -> Tensor:
    return shard.full_tensor() if isinstance(shard, DTensor) else shard
