"""Counts the numbers that vLLM's loaders take when weights are reloaded, and refuses a reload that left some out.

vLLM reloads a model layer by layer: its loaders copy weights into empty parameters, and a complete layer is brought
into vLLM's own layout, from which nothing can be read back. A name that a loader does not know is skipped in silence,
and a layer without new weights keeps the old ones. vLLM counts the numbers of each layer to know when it is complete
(`vllm.model_executor.model_loader.reload`). These counts are compared here when all weights have come. Tensors that
vLLM does not count, such as the bias of a router's scores, are copied at once: they are read back. Called by the worker
extension, for every push.

In a partial push, most layers get no weights on purpose and keep their own. A layer that gets some must still get all.
The model takes as many numbers as came; a part of it, as many as in the first partial push over the connection, in
which the extension compares what the loaders read of each weight with the complete push before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import inplace, layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.models.utils import WeightsMapper

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.loader_reads import unrecorded

__all__ = ["Expected", "counted_load"]

_SHOWN: Final = 4
_WARNINGS: Final = {
    layerwise.logger.name: "%s: Failed to load weights",
    inplace.logger.name: "Following weights were not loaded from checkpoint: %s",
}
"""vLLM's warnings of layers that get no weights. Those of a partial push are many, and are checked here."""


@dataclass(frozen=True)
class Expected:
    """What a load must bring.

    is_whole: the model is not divided over GPUs, so it takes as many numbers as came. is_partial: layers may get
    nothing. num_taken: how many numbers a part of a model takes; None: unknown.
    """

    is_whole: bool
    is_partial: bool = False
    num_taken: int | None = None


@contextmanager
def counted_load(model: nn.Module, version: int, expected: Expected) -> Iterator[Callable[[], int]]:
    """Count what the model's `load_weights` takes in the block; check it at the end, when the model is complete again.

    Yields a function that returns how many numbers were taken; call it after the block.

    Raises:
        WeightSyncError: some weights were not taken, or some layers got no or not all weights.
    """
    loads: list[_Load] = []
    load: Callable[[Iterable[tuple[str, Tensor]]], Any] = model.load_weights  # type: ignore[assignment]

    def counting(weights: Iterable[tuple[str, Tensor]]) -> Any:
        loads.append(counted := _Load(model))
        taken = load(counted.passing(weights))
        counted.finish()
        return taken

    model.load_weights = counting  # type: ignore[assignment]
    try:
        with _without_warnings() if expected.is_partial else nullcontext():
            yield lambda: sum(counted.num_taken for counted in loads)
    finally:
        del model.load_weights
    if not loads:
        raise WeightSyncError(
            f"vLLM did not call the loader of its {type(model).__name__} for version {version} of the weights: report "
            "this with the model's config.json"
        )
    for counted in loads:
        counted.check(version, expected)


@contextmanager
def _without_warnings() -> Iterator[None]:
    def is_other(record: logging.LogRecord) -> bool:
        return record.msg != _WARNINGS[record.name]

    loggers = [logging.getLogger(name) for name in _WARNINGS]
    for one in loggers:
        one.addFilter(is_other)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(is_other)


class _Load:
    """One call of a model's `load_weights`. vLLM has emptied the layers before it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = {name: layer for name, layer in model.named_modules() if layer._parameters}
        self._totals = {name: _total(layer) for name, layer in self._layers.items()}
        # Tied layers share a parameter, and only one of them gets weights.
        self._kernels = {name: _parameters(layer) for name, layer in self._layers.items()}
        self._num_came = 0
        self._copied: dict[str, Tensor] = {}
        self._not_held: list[str] = []
        self._taken: Mapping[str, int] = {}

    def passing(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) unchanged, and count the numbers."""
        held = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        mapper: WeightsMapper | None = getattr(self._model, "hf_to_vllm_mapper", None)
        for name, tensor in weights:
            if not _is_uncounted(name):
                self._num_came += tensor.numel()
            elif (own_name := name if mapper is None else mapper.map_name(name)) in held:
                # Only of these a copy: a stage reads nothing of another one's.
                with unrecorded():
                    self._copied[own_name] = tensor.clone()
            elif own_name is not None:
                # vLLM does not leave it out on purpose.
                self._not_held.append(name)
            yield name, tensor

    def finish(self) -> None:
        """Read vLLM's counts; call it before vLLM resets them."""
        self._taken = {name: self._taken_by(name) for name in self._layers}

    @property
    def num_taken(self) -> int:
        """How many numbers all layers took."""
        return sum(self._taken.values())

    def check(self, version: int, expected: Expected) -> None:
        """Compare the counts.

        Raises:
            WeightSyncError: with the numbers and the first layers.
        """
        num_taken, wanted = self.num_taken, self._num_came if expected.is_whole else expected.num_taken
        filled = [name for name in self._layers if self._taken[name] or not expected.is_partial]
        incomplete = [name for name in filled if self._is_incomplete(name)]
        incomplete += self._not_copied(expected)
        if not incomplete and wanted in (None, num_taken):
            return
        more = f" and {len(incomplete) - _SHOWN} more" if len(incomplete) > _SHOWN else ""
        layers = f"; layers without all of their weights: {', '.join(incomplete[:_SHOWN])}{more}" if incomplete else ""
        raise WeightSyncError(
            f"vLLM's model does not hold version {version} of the weights, though all of it arrived: its loader for "
            f"{type(self._model).__name__} took {num_taken} of {wanted or self._num_came} numbers{layers}. "
            "Create another PPOJob with spec.model.actor.path of a family whose push to vLLM is tested "
            "(docs/support-matrix.md), and report this with the config.json of the present one"
        )

    def _not_copied(self, expected: Expected) -> list[str]:
        """Return the names of the tensors that are not counted and did not come, or are not in the model."""
        held = dict(self._model.named_parameters(remove_duplicate=False))
        # A part of a model may have none of them: those of another stage.
        wrong = [*self._not_held] if expected.is_whole else []
        wrong += [
            name
            for name, tensor in self._copied.items()
            if not _is_part(held[name].to(tensor.device, tensor.dtype), tensor)
        ]
        if expected.is_partial:
            return wrong
        came = {id(held[name]) for name in self._copied}
        # A router and its experts share one.
        named = self._model.named_parameters()
        return wrong + [name for name, tensor in named if _is_uncounted(name) and id(tensor) not in came]

    def _taken_by(self, name: str) -> int:
        info = get_layerwise_info(self._layers[name])
        # vLLM resets the count of a layer as soon as it is complete.
        return info.load_numel if info.can_load() else self._totals[name]

    def _is_incomplete(self, name: str) -> bool:
        layer, taken = self._layers[name], self._taken[name]
        if is_deferred_attention_layer(layer) or self._is_tied_to_another(name):
            return False
        if isinstance(layer, VocabParallelEmbedding) and taken > 0:
            # It has rows to spare.
            return False
        counted = (buffer for key, buffer in layer._buffers.items() if key not in SKIP_LOAD_TENSORS)
        buffers: int = sum(buffer.numel() for buffer in counted if buffer is not None)
        return taken < self._totals[name] - buffers

    def _is_tied_to_another(self, name: str) -> bool:
        mine = self._kernels[name]
        return any(mine & self._kernels[other] for other, taken in self._taken.items() if other != name and taken)


def _is_part(held: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is the other one, or this GPU's part of it: GPUs that divide the heads divide their sinks."""
    if len(held) < len(whole):
        whole = torch.split(whole, len(held))[get_tensor_model_parallel_rank()]
    return torch.equal(held, whole)


def _is_uncounted(name: str) -> bool:
    return name.rpartition(".")[2] in SKIP_LOAD_TENSORS


def _total(layer: nn.Module) -> int:
    return get_layerwise_info(layer).load_numel_total or 0


def _parameters(layer: nn.Module) -> frozenset[int]:
    """Return the identities of the parameters that vLLM computes with, which it puts aside while it reloads.

    Those that it does not count are left out: a router and its experts share one.
    """
    kernels = get_layerwise_info(layer).kernel_tensors
    named = kernels[0].items() if kernels is not None else ()
    return frozenset(id(parameter) for name, parameter in named if name not in SKIP_LOAD_TENSORS)
