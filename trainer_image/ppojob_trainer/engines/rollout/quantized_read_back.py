"""Checks whether vLLM's quantized layers hold the received weights, as exactly as a rounded number can be compared.

vLLM reloads a layer in three steps, and each is compared at the layer itself:

    received ── loaded in bfloat16 ── rounded to FP8 with scales ── copied to where the kernels read
             1                     2                             3

1: the sum of all bit patterns, as `read_back` does, and as there of the boxes that this GPU's loaders read; 2: each
weight, within the rounding error of the format; 3: the bit patterns of each layer. So a layer that got no weights,
those of another layer, or other scales is found. A difference that the format rounds away is none. Called by the worker
extension at the first and each tenth push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.platforms import current_platform

from ppojob_api.v1alpha1.rollout import Quantization
from ppojob_trainer.engines.errors import EngineArgumentError, WeightSyncError
from ppojob_trainer.engines.rollout.read_back import bits_of, total_of

__all__ = ["QuantizedReadBack", "check_gpu", "is_quantized", "quantized_layers", "read_back_quantized"]

# E4M3 has three bits after the leading one: a number is rounded by at most 1/16 of itself, and below the normal ones
# by at most half of the smallest number, 2^-9, in units of the scale. The sum of both leaves room for the rounding of
# scale and quotient in float32.
_RELATIVE, _ABSOLUTE = 2.0**-4, 2.0**-10
_PIECE = 2**22
_NEEDED_CAPABILITY = 89

_Layer: TypeAlias = Any
"""A linear layer of vLLM. It has `quant_method`, and once it is loaded `weight` and `weight_scale`."""


def check_gpu(quantization: Quantization) -> None:
    """Check that the GPU multiplies in the format; nothing is checked on the CPU, where it is emulated.

    Raises:
        EngineArgumentError: with the GPU's name.
    """
    if current_platform.is_cpu() or current_platform.has_device_capability(_NEEDED_CAPABILITY):
        return
    raise EngineArgumentError(
        f"spec.rollout.quantization {quantization}: {current_platform.get_device_name()} has no FP8 units: use GPUs of "
        "compute capability 8.9 or later (Ada, Hopper, Blackwell) in the pools of spec.placement.rollout, or create "
        "another PPOJob without spec.rollout.quantization"
    )


def quantized_layers(model: nn.Module) -> dict[str, _Layer]:
    """Return the layers whose weights vLLM rounds when it loads them, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "quant_method", None), OnlineLinearBase)
    }


def is_quantized(model: nn.Module) -> bool:
    """Whether vLLM rounds weights of the model when it loads them."""
    return bool(quantized_layers(model))


@contextmanager
def read_back_quantized(model: nn.Module, version: int) -> Iterator[QuantizedReadBack]:
    """Follow a reload of the model in the block; call `check` after it."""
    found = QuantizedReadBack(model, version)
    methods = {name: layer.quant_method for name, layer in found.layers.items()}
    for name, method in methods.items():
        vars(method)["process_weights_after_loading"] = found.observing(name, method.process_weights_after_loading)
    try:
        yield found
    finally:
        for method in methods.values():
            del vars(method)["process_weights_after_loading"]


class QuantizedReadBack:
    """See the module's docstring."""

    def __init__(self, model: nn.Module, version: int) -> None:
        self._model, self._version = model, version
        self.layers = quantized_layers(model)
        self._came: list[Tensor] = []
        self._loaded: dict[str, Tensor] = {}
        self._rounded: dict[str, Tensor] = {}
        self._worst: dict[str, Tensor] = {}

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) unchanged, and add up the tensors."""
        for name, tensor in tensors:
            self.add(tensor)
            yield name, tensor

    def add(self, tensor: Tensor) -> None:
        """Add up numbers that belong into the model, as vLLM loads them: in bfloat16."""
        self._came.append(bits_of(tensor.to(torch.bfloat16)))

    def observing(self, name: str, process: Callable[[_Layer], None]) -> Callable[[_Layer], None]:
        """Return vLLM's function that rounds a layer, with a comparison of its weights before and after."""

        def processed(layer: _Layer) -> None:
            loaded: Tensor = layer.weight
            self._loaded[name] = bits_of(loaded)
            process(layer)
            self._rounded[name] = _bits_of_layer(layer)
            self._worst[name] = rounding_error(loaded, layer.weight, layer.weight_scale)

        return processed

    def check(self, *, are_all_known: bool) -> bool:
        """Compare; return whether the whole model was compared. Waits for the device.

        Args:
            are_all_known: what was added are the numbers that belong into the model, each once.

        Raises:
            WeightSyncError: some layer does not have the weights that came, as exactly as the format allows.
        """
        for name, layer in self.layers.items():
            if name not in self._rounded:
                self._refuse(f"the weights of layer {name} were not rounded in this push, so it has older ones")
            # Not a number is no small error either.
            if not (worst := float(self._worst[name])) <= 1:
                self._refuse(
                    f"a weight of layer {name} differs from the received one by {worst:.3g} times the largest error of "
                    "rounding to FP8"
                )
            if int(_bits_of_layer(layer)) != int(self._rounded[name]):
                self._refuse(f"layer {name} computes with other weights than those that were rounded for it")
        if not are_all_known:
            return False
        held = int(total_of([*self._loaded.values(), *self._bits_of_others()]))
        if held != (came := int(total_of(self._came))):
            self._refuse(f"the sum of the bits that were loaded is {held}, that of the received weights {came}")
        return True

    def _bits_of_others(self) -> list[Tensor]:
        """Return the sums of the parameters that are not quantized."""
        own = {id(layer.weight) for layer in self.layers.values()}
        own |= {id(layer.weight_scale) for layer in self.layers.values()}
        return [bits_of(one.detach()) for one in self._model.parameters() if id(one) not in own]

    def _refuse(self, what: str) -> None:
        raise WeightSyncError(
            f"vLLM's {type(self._model).__name__} does not hold version {self._version} of the weights in FP8, though "
            f"all of it arrived: {what}. Create another PPOJob without spec.rollout.quantization, and report this with "
            "the model's config.json"
        )


def rounding_error(weight: Tensor, rounded: Tensor, scale: Tensor) -> Tensor:
    """Return the largest error of a weight as a share of what rounding to E4M3 may cost; a float32 scalar.

    Args:
        weight: [outputs, inputs], not rounded.
        rounded: [inputs, outputs] float8_e4m3fn; a kernel may have added rows and columns.
        scale: [outputs, 1] float32, by which a rounded row is multiplied.
    """
    num_outputs, num_inputs = weight.shape
    by_output, scales = rounded.t()[:num_outputs, :num_inputs], scale.view(-1, 1)[:num_outputs]
    errors, rows = [], max(1, _PIECE // num_inputs)
    for start in range(0, num_outputs, rows):
        part = slice(start, start + rows)
        exact = weight[part].float()
        allowed = exact.abs() * _RELATIVE + scales[part] * _ABSOLUTE
        errors.append(((by_output[part].float() * scales[part] - exact).abs() / allowed).max())
    return torch.stack(errors).max()


def _bits_of_layer(layer: _Layer) -> Tensor:
    return total_of([bits_of(layer.weight.detach().t()), bits_of(layer.weight_scale.detach())])
