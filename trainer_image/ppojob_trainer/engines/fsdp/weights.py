"""A sharded model's parameters, whole and under HuggingFace's names: `WeightSource` for a weight transfer.

Called by `WeightSender`. Tied parameters go once, under their first name, as in a HuggingFace checkpoint. Adapters are
merged into the weights that they belong to, in float32, so the rollout engine knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppojob_trainer.engines.fsdp.lora import adapter_of, is_adapter, merge
from ppojob_trainer.engines.weight_buckets import TensorSpec


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

    def specs(self) -> list[TensorSpec]:
        """Return the parameters in the order of `gather`."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [TensorSpec(name, tuple(parameter.shape), dtype) for name, parameter in self._parameters()]

    @torch.no_grad()
    def gather(self) -> Iterator[Tensor]:
        """Yield each parameter whole, on the device. Collective."""
        with self._on_device():
            for name, parameter in self._parameters():
                layer = adapter_of(self._language_model, name)
                if layer is None:
                    yield _whole(parameter.detach().to(self._dtype))
                else:
                    weight, down, up = (_whole(part.detach()) for part in (parameter, layer.lora_A, layer.lora_B))
                    yield merge(weight, down, up, layer.factor).to(self._dtype)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self._language_model.named_parameters()
        return ((name, parameter) for name, parameter in named if not is_adapter(name))


def _whole(shard: Tensor) -> Tensor:
    return shard.full_tensor() if isinstance(shard, DTensor) else shard
