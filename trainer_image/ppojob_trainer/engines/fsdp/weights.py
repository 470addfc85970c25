"""A sharded model's parameters, whole and under HuggingFace's names: `WeightSource` for a weight transfer.

Called by `WeightSender`. Tied parameters go once, under their first name, as in a HuggingFace checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppojob_trainer.engines.weight_buckets import TensorSpec


class ShardedWeights:
    """See the module's docstring."""

    def __init__(self, language_model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        """Take the parameters of `language_model`; they are sent in `dtype`, which halves what float32 would cost."""
        self._language_model, self._dtype = language_model, dtype

    def specs(self) -> list[TensorSpec]:
        """Return the parameters in the order of `gather`."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [
            TensorSpec(name, tuple(parameter.shape), dtype)
            for name, parameter in self._language_model.named_parameters()
        ]

    @torch.no_grad()
    def gather(self) -> Iterator[Tensor]:
        """Yield each parameter whole, on the device. Collective."""
        for parameter in self._language_model.parameters():
            shard = parameter.detach().to(self._dtype)
            yield shard.full_tensor() if isinstance(shard, DTensor) else shard
