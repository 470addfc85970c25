"""A process of its own, because vLLM changes much where it is imported: prints which models keep their weights."""

import json
import sys

from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from ppojob_trainer.engines.vllm.worker_extension import keeps_weights_as_they_come


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

if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: keeps_weights_as_they_come(model) for name, model in MODELS.items()}))
