"""What the tests' worker of vLLM has in addition: the bytes of the model's weights by their format."""

from __future__ import annotations

from collections import Counter

from ppojob_trainer.engines.rollout.quantized_read_back import quantized_layers
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension


class FormatExtension(WeightReceiverExtension):
    """Runs in vLLM's process, which imports it by its name."""

    def ppojob_bytes_by_format(self) -> dict[str, int]:
        """Return the bytes of the layers that are quantized, those of the weights in them, and those of the rest."""
        model = self.model_runner.get_model()
        found: Counter[str] = Counter()
        own = {id(parameter) for layer in quantized_layers(model).values() for parameter in layer.parameters()}
        for parameter in model.parameters():
            kind = "quantized" if id(parameter) in own else "others"
            found[f"{kind} {str(parameter.dtype).removeprefix('torch.')}"] += parameter.numel() * parameter.itemsize
        return dict(found)
