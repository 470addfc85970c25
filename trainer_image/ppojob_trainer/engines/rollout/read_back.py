"""Checks whether vLLM's model holds the received weights, by reading its parameters after they were copied.

The checksums of a transfer cover the bytes that arrived. Then vLLM's `load_weights` renames, fuses and pads them. All
of this preserves one number, the sum of all parameters' bit patterns, which is compared here. For a model that is
divided over GPUs, only the boxes that this GPU's loaders read count (`loader_reads`). Some models leave out weights on
purpose, such as layers for speculative decoding: this is logged, and nothing is compared. After a partial transfer, all
parameters are compared too: the sums of the tensors that did not come are those of the last complete transfer. Called
by the worker extension. Pure torch, and exact.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.weights.sums import PIECE, patterns

__all__ = ["ReadBack", "bits_of", "total_of"]

logger = logging.getLogger(__name__)


class ReadBack:
    """Follows one weight transfer: `passing` or `add` while the weights are loaded, then `check`."""

    def __init__(self, version: int, earlier: ReadBack | None = None) -> None:
        """`earlier`: the complete transfer before a partial one; its tensors count where none of that name comes."""
        self._version = version
        self._came: dict[str, _Numbers] = {}
        self._earlier = {} if earlier is None else earlier._came

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) unchanged, and add up the tensors."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Add up numbers of a weight that belong into the model."""
        came = self._came.setdefault(name, _Numbers(tensor.dtype))
        came.sums.append(bits_of(tensor))
        came.number += tensor.numel()

    def check(self, model: nn.Module, computed: Collection[nn.Parameter] = ()) -> bool:
        """Compare with the parameters of the model, or of this GPU's part of it; return whether this was possible.

        Waits for the device. A model is not compared if its dtype differs from that of the weights, or if it has fewer
        numbers than arrived.

        Args:
            computed: parameters that vLLM computes from others: nobody sends them.

        Raises:
            WeightSyncError: some of the weights are not in the model, or the model has some that were not sent.
        """
        left = {id(parameter) for parameter in computed}
        parameters = [parameter.detach() for parameter in model.parameters() if id(parameter) not in left]
        weights = (self._earlier | self._came).values()
        if {parameter.dtype for parameter in parameters} != {weight.dtype for weight in weights}:
            return False
        num_numbers = sum(weight.number for weight in weights)
        left_out = num_numbers - sum(parameter.numel() for parameter in parameters)
        name = type(model).__name__
        if left_out > 0:
            logger.warning("vLLM's loader for %s leaves out %d of %d numbers", name, left_out, num_numbers)
            return False
        came = int(total_of([one for weight in weights for one in weight.sums]))
        held = int(total_of([bits_of(parameter) for parameter in parameters]))
        if came != held:
            raise WeightSyncError(
                f"vLLM's parameters are not version {self._version} of the weights, though all of it arrived: the sum "
                f"of their bits is {held}, that of the weights {came}. Its loader for {name} left some out or changed "
                "them"
            )
        return True


@dataclass
class _Numbers:
    """Those of a weight that belong into the model: how many, and the sums of their bit patterns."""

    dtype: torch.dtype
    number: int = 0
    sums: list[Tensor] = field(default_factory=list)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bit patterns, an int64 scalar that does not depend on the tensor's layout."""
    return total_of([piece.sum(dtype=torch.int64) for piece in torch.split(patterns(tensor).view(-1), PIECE)])


def total_of(sums: list[Tensor]) -> Tensor:
    """Add up sums of bit patterns; they may overflow, which loses nothing."""
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)
