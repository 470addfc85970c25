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


def outcomes(model: Model) -> dict[str, str]:
    """Copy weights, compared and not; return what was found."""
    worker = WeightReceiverExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.vllm_config = cast(VllmConfig, SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1)))
    # The weights are on the CPU.
    worker.device = torch.device("cuda")
    found = {}
    for number, name in enumerate(("compared", "not compared")):
        try:
            done = worker._ppojob_load(number, iter([("weight", torch.ones(3))]), is_compared=number == 0)
            found[name] = "read back" if done == (True, None) else "loaded"
        except WeightSyncError:
            found[name] = "refused"
    return found


if __name__ == "__main__":
    found = {
        "kept": {name: keeps_weights_as_they_come(model) for name, model in MODELS.items()},
        "changing": outcomes(Model(changes_at=range(2))),
        "right": outcomes(Model()),
    }
    sys.stdout.write(json.dumps(found))
