"""Checks whether vLLM's model holds the received weights, by reading its parameters after they were copied.

The checksums of a transfer cover the bytes that arrived. Then vLLM's `load_weights` renames, fuses and pads them. All
of this preserves one number, the sum of all parameters' bit patterns, which is compared here. For a model that is
divided over GPUs, only the boxes that this GPU's loaders read count (`loader_reads`). Some models leave out weights on
purpose, such as layers for speculative decoding: this is logged, and nothing is compared. Called by the worker
extension. Pure torch, and exact.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.weights.sums import PIECE, patterns

__all__ = ["ReadBack", "bits_of", "total_of"]

logger = logging.getLogger(__name__)


class ReadBack:
    """Follows one weight transfer: `passing` or `add` while the weights are loaded, then `check`."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._sums: list[Tensor] = []
        self._dtypes: set[torch.dtype] = set()
        self._num_numbers = 0

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) unchanged, and add up the tensors."""
        for name, tensor in tensors:
            self.add(tensor)
            yield name, tensor

    def add(self, tensor: Tensor) -> None:
        """Add up numbers that belong into the model."""
        self._sums.append(bits_of(tensor))
        self._dtypes.add(tensor.dtype)
        self._num_numbers += tensor.numel()

    def check(self, model: nn.Module) -> bool:
        """Compare with the parameters of the model, or of this GPU's part of it; return whether this was possible.

        Waits for the device. A model is not compared if its dtype differs from that of the weights, or if it has fewer
        numbers than arrived.

        Raises:
            WeightSyncError: some of the weights are not in the model, or the model has some that were not sent.
        """
        parameters = [parameter.detach() for parameter in model.parameters()]
        if {parameter.dtype for parameter in parameters} != self._dtypes:
            return False
        left_out = self._num_numbers - sum(parameter.numel() for parameter in parameters)
        name = type(model).__name__
        if left_out > 0:
            logger.warning("vLLM's loader for %s leaves out %d of %d numbers", name, left_out, self._num_numbers)
            return False
        came, held = int(total_of(self._sums)), int(total_of([bits_of(parameter) for parameter in parameters]))
        if came != held:
            raise WeightSyncError(
                f"vLLM's parameters are not version {self._version} of the weights, though all of it arrived: the sum "
                f"of their bits is {held}, that of the weights {came}. Its loader for {name} left some out or changed "
                "them"
            )
        return True


def bits_of(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bit patterns, an int64 scalar that does not depend on the tensor's layout."""
    return total_of([piece.sum(dtype=torch.int64) for piece in torch.split(patterns(tensor).view(-1), PIECE)])


def total_of(sums: list[Tensor]) -> Tensor:
    """Add up sums of bit patterns; they may overflow, which loses nothing."""
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)
