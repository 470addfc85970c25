"""Prints what the worker extension does. A separate process, because an import of vLLM changes much."""

import json
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension, keeps_weights_as_they_come


class Quantized(UnquantizedLinearMethod):
    """Any other method than vLLM's own plain ones."""


def model_with(**attributes: object) -> nn.Module:
    """Return a model one of whose parts has the attributes."""
    part = nn.Module()
    for name, value in attributes.items():
        setattr(part, name, value)
    return nn.Sequential(nn.Module(), part)


MODELS = {
    "plain": model_with(quant_method=UnquantizedLinearMethod()),
    "quantized": model_with(quant_method=Quantized()),
    "worked on": model_with(process_weights_after_loading=lambda dtype: None),
}


class Model(nn.Module):
    """Takes one weight, and changes it at the copies whose numbers are given."""

    def __init__(self, changes_at: Iterable[int] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.changes_at, self.num_copies = set(changes_at), 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        ((_, tensor),) = weights
        self.weight.data.copy_(tensor + (self.num_copies in self.changes_at))
        self.num_copies += 1


def refused_copies(model: Model, tensor_parallel_size: int = 1) -> list[int]:
    """Copy weights 21 times; return the numbers of the copies that were refused, less than 0 those that passed."""
    worker = WeightReceiverExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    parallel = SimpleNamespace(tensor_parallel_size=tensor_parallel_size)
    worker.vllm_config = cast(VllmConfig, SimpleNamespace(parallel_config=parallel))
    worker.ppojob_num_pushes = 0
    refused = []
    for number in range(21):
        try:
            if worker._ppojob_copy_in(number, iter([("weight", torch.ones(3))])):
                refused.append(-number - 1)
        except WeightSyncError:
            refused.append(number)
    return refused


if __name__ == "__main__":
    found = {
        "kept": {name: keeps_weights_as_they_come(model) for name, model in MODELS.items()},
        "refused": refused_copies(Model(changes_at=range(21))),
        "right": refused_copies(Model()),
        "divided": refused_copies(Model(changes_at=range(21)), tensor_parallel_size=2),
    }
    sys.stdout.write(json.dumps(found))
