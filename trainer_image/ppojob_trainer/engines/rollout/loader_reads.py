"""Records which part of each weight vLLM's loaders read, so that nobody has to know how they divide a model.

    loader: loaded_weight.narrow(0, 2048, 2048)  →  param.copy_(that)
                     a view, reads nothing            reads rows 2048 to 4096 of the weight

While a model's `load_weights` runs in the block, each operation that is no view counts as a read of its arguments,
except one that takes their shapes alone. A part that is no box of the weight counts as the whole weight. So the record
may say too much, and never too little, unless a loader reads memory without PyTorch's operations. Called by the worker
extension for engines of several GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppojob_trainer.engines.weights.boxes import Box, box_of, merged, whole_box

__all__ = ["LoaderReads", "unrecorded"]

logger = logging.getLogger(__name__)

_ATEN = torch.ops.aten
_OF_SHAPES: Final = frozenset({_ATEN.empty_like, _ATEN.zeros_like, _ATEN.new_empty, _ATEN.new_zeros})
"""Operations that take shape and dtype of a tensor, and none of its numbers."""
_is_paused: ContextVar[bool] = ContextVar("is_paused", default=False)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let what the block reads be no read of a loader."""
    token = _is_paused.set(True)
    try:
        yield
    finally:
        _is_paused.reset(token)


@dataclass
class _Weight:
    """A weight that arrived: its place in its memory, in bytes, and the boxes of it that were read.

    has_other_reads: something was read that is no box.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int
    boxes: set[Box] = field(default_factory=set)
    has_other_reads: bool = False

    def read(self) -> tuple[Box, ...] | None:
        """Return the boxes, joined and in order; None if they are not all, or overlap."""
        return None if self.has_other_reads else merged(self.boxes)


class LoaderReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module's docstring. It is a context manager, for one load."""

    def __init__(self, on_read: Callable[[str, Tensor], None] | None = None) -> None:
        """`on_read` gets the weight's name and the numbers of each box when it is first read.

        It gets each number once, if the reads are exact.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_read = on_read
        self._weights: dict[str, _Weight] = {}
        # By the address of a storage. A weak reference keeps the address from being used again.
        self._in_storage: dict[int, list[_Weight]] = {}
        self._storages: list[StorageWeakRef] = []

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) unchanged, and know them from then on. The tensors must be contiguous."""
        for name, tensor in tensors:
            begin = int(tensor.storage_offset()) * tensor.element_size()
            weight = _Weight(name, tuple(tensor.shape), tensor.dtype, begin, begin + int(tensor.nbytes))
            self._weights[name] = weight
            storage = tensor.untyped_storage()
            if storage._cdata not in self._in_storage:
                self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._in_storage.setdefault(storage._cdata, []).append(weight)
            yield name, tensor

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """Return what was read of each weight: boxes that do not overlap, in order; none of a weight that was not read.

        A weight whose reads are not exact counts as read whole.
        """
        read = {name: (weight, weight.read()) for name, weight in self._weights.items()}
        return {name: (whole_box(weight.shape),) if boxes is None else boxes for name, (weight, boxes) in read.items()}

    def are_exact(self, model: nn.Module) -> bool:
        """Whether all reads were boxes that do not overlap; logs those that were not."""
        inexact = [name for name, weight in self._weights.items() if weight.read() is None]
        if inexact:
            logger.warning(
                "vLLM's loader for %s divides %d weights in an unknown way: %s",
                type(model).__name__,
                len(inexact),
                inexact[:4],
            )
        return not inexact

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (_is_view(func) or func.overloadpacket in _OF_SHAPES or _is_paused.get()):
            for argument in tree_leaves((args, kwargs)):
                if isinstance(argument, Tensor) and argument.numel():
                    self._read(argument)
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: Tensor) -> None:
        begin = int(tensor.storage_offset()) * tensor.element_size()
        for weight in self._in_storage.get(tensor.untyped_storage()._cdata, ()):
            if not weight.begin <= begin < weight.end:
                continue
            offset = (begin - weight.begin) // tensor.element_size()
            box = box_of(tensor, weight.shape, offset) if tensor.dtype == weight.dtype else None
            if box is None:
                weight.has_other_reads = True
            elif box not in weight.boxes:
                weight.boxes.add(box)
                if self._on_read is not None:
                    self._on_read(weight.name, tensor)


def _is_view(func: Any) -> bool:
    """Whether an operation returns its argument's memory and reads none of it."""
    results = func._schema.returns
    return bool(results) and all(result.alias_info is not None and not result.alias_info.is_write for result in results)
