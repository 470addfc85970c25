"""One rank that loads a model: what it has then, whole, and how much of the checkpoint it read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ppojob_trainer.engines.train.fsdp import loading
from ppojob_trainer.engines.train.fsdp.experts import COUNTS
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, load_policy
from ppojob_trainer.engines.train.fsdp.routing import DIFFERING
from ppojob_trainer.engines.train.mesh import ParallelMesh

FLOAT32 = LoadOptions(dtype=torch.float32)
NUM_EXPERTS = 6


class Counted:
    """A tensor in a file that counts the bytes which are read of it."""

    def __init__(self, name: str, tensor: Any, read: dict[str, int]) -> None:
        self.name, self.tensor, self.read = name, tensor, read

    def get_shape(self) -> list[int]:
        shape: list[int] = self.tensor.get_shape()
        return shape

    def __getitem__(self, key: Any) -> Tensor:
        found: Tensor = self.tensor[key]
        self.read[self.name] = self.read.get(self.name, 0) + found.nbytes
        return found


def whole_and_read(parallel: ParallelMesh, model: Path, options: LoadOptions) -> dict[str, Any]:
    """Return all parameters and buffers after loading, the bytes that were read, and the number of experts' tensors."""
    read: dict[str, int] = {}
    tensors_of = loading._tensors

    def counted(*arguments: Any) -> dict[str, Any]:
        found = tensors_of(*arguments)
        is_slice = {name: not isinstance(tensor, Tensor) for name, tensor in found.items()}
        return {name: Counted(name, one, read) if is_slice[name] else one for name, one in found.items()}

    with mock.patch.object(loading, "_tensors", counted):
        model_of_language = load_policy(str(model), options, parallel).language_model
    named = (*model_of_language.named_parameters(), *model_of_language.named_buffers())
    return {
        # transformers does not have the counts.
        "tensors": {
            name: _whole(one.detach()).clone() for name, one in named if not name.endswith((COUNTS, DIFFERING))
        },
        "bytes": sum(read.values()),
        "experts": sum(".experts." in name for name in read),
    }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
