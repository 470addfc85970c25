"""What the tests' workers of vLLM have in addition: the bytes of a model's weights by format, and two defects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from ppojob_trainer.engines.rollout.quantized_read_back import quantized_layers
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension
from ppojob_trainer.engines.weights.receiver import WeightStream


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


class ChangingExtension(WeightReceiverExtension):
    """Changes one weight between its arrival and vLLM's loader, in the second worker, once."""

    def ppojob_change_next(self) -> None:
        """Change a weight of the next push."""
        self._is_changing = self.rank == 1

    def _ppojob_reload(
        self, version: int, tensors: Iterator[tuple[str, torch.Tensor]], *, is_partial: bool = False
    ) -> None:
        is_changing, self._is_changing = getattr(self, "_is_changing", False), False
        super()._ppojob_reload(version, changed(tensors) if is_changing else tensors, is_partial=is_partial)


class DroppingExtension(WeightReceiverExtension):
    """Receives each push, with a receipt as if it had loaded it, and loads nothing."""

    def _ppojob_load(self, version: int, stream: WeightStream) -> tuple[bool, None]:
        for _ in stream:
            pass
        return True, None


def changed(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, -tensor if name.endswith("1.self_attn.o_proj.weight") else tensor
