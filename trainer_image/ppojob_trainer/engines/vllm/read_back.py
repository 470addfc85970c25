"""Whether vLLM's model holds the weights that came: its own parameters are read again after they were copied into.

The checksums of a transfer are of the bytes that arrived. What a model's `load_weights` does with them is vLLM's: it
renames, fuses and pads, and leaves out what it does not know. All of that keeps one number, the sum of all parameters'
bit patterns, and it is compared. Called by the worker extension. Pure torch, and exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ppojob_trainer.engines.errors import WeightSyncError

__all__ = ["ReadBack"]

_PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReadBack:
    """Goes through one transfer of weights: `passing` on their way into the model, then `check`."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._sums: list[Tensor] = []
        self._dtypes: set[torch.dtype] = set()

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass (name, tensor) on, and take note of the tensors."""
        for name, tensor in tensors:
            self._sums.append(_bits(tensor))
            self._dtypes.add(tensor.dtype)
            yield name, tensor

    def check(self, model: nn.Module) -> None:
        """Compare with the parameters of the whole model; waits for the device.

        A model that computes in another dtype than the weights came in is not compared.

        Raises:
            WeightSyncError: some of the weights are not in the model, or the model has some that did not come.
        """
        parameters = list(model.parameters())
        if {parameter.dtype for parameter in parameters} != self._dtypes:
            return
        came, held = int(_total(self._sums)), int(_total([_bits(parameter.detach()) for parameter in parameters]))
        if came != held:
            raise WeightSyncError(
                f"vLLM's parameters are not version {self._version} of the weights, though all of it arrived: the sum "
                f"of their bits is {held}, that of the weights {came}. Its loader for {type(model).__name__} left some "
                "out or changed them"
            )


def _bits(tensor: Tensor) -> Tensor:
    # Of one dimension: views of another dtype want the last one dense.
    return tensor.contiguous().view(-1).view(_PATTERNS[tensor.element_size()]).sum(dtype=torch.int64)


def _total(sums: list[Tensor]) -> Tensor:
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)
