"""The experts of a mixture, gathered some at a time: a layer of DeepSeek-V3 has 22.5 GB of them in bfloat16.

Called by `weights`, for large parameters and for those with adapters, if checkpoints have each expert by itself. A
fused parameter [E, outputs, inputs] is divided by whole experts, whatever divides it: expert parallelism, FSDP,
pipeline stages, copies of the model. So each rank first says which experts it has; then, for each block of experts, the
first rank that has them merges their adapters, if there are any, and broadcasts them to all ranks. It needs no
knowledge of the meshes.

Refused: gathering one parameter of a layer at a time, because the larger one has two thirds of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ppojob_trainer.engines.train.fsdp.checkpoint_tensors import Written

__all__ = ["ExpertBlocks", "in_blocks", "is_large", "rows_of"]

LARGE_BYTES = 2 * 2**30
"""A fused parameter of more bytes is gathered in blocks, also without adapters."""
BLOCK_BYTES = 256 * 2**20
"""Most bytes of a block; a block has at least one expert."""

_Rows: TypeAlias = tuple[int, int]
"""The first expert of a rank, and how many it has from there on."""


def is_large(written: Sequence[Written], dtype: torch.dtype) -> bool:
    """Whether the experts of a parameter are large. written: the tensors that a checkpoint has of them."""
    return sum(math.prod(one.shape) for one in written) * dtype.itemsize > LARGE_BYTES


def in_blocks(written: Sequence[Written]) -> list[Written]:
    """Return the tensors of fused experts in the order in which blocks of experts have them."""
    return sorted(written, key=lambda one: (one.expert or 0, one.first_row))


class ExpertBlocks:
    """The parameters of a model that are gathered in blocks. All methods are collective over all of its ranks."""

    def __init__(
        self,
        own: Mapping[str, Tensor],
        experts: Callable[[str, Tensor, int, int], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Find out who has which experts.

        Args:
            own: such parameters of this rank, by name; those of other pipeline stages are missing. They are these for
                as long as the blocks are gathered: the model's own may be gathered meanwhile, with other layers.
            experts: returns some of the experts that this rank has of a parameter, in `dtype` and with its adapters.
                Called with the parameter's name, the parameter, the first of these experts among all, and their number.
            dtype, device: of the blocks.
        """
        self._own, self._experts, self._dtype, self._device = own, experts, dtype, device
        self._rows = _rows_of_all(own)

    def gather(
        self, name: str, shape: Sequence[int], written: Sequence[Written]
    ) -> Iterator[tuple[Sequence[Written], Tensor, int]]:
        """Yield each block, with the tensors of a checkpoint that it has, and its first expert.

        Args:
            shape: of the whole parameter.
            written: its tensors, in the order of `in_blocks`.
        """
        left = iter(written)
        of_expert = len(written) // shape[0]
        for first, number, owner in self._blocks(name, shape):
            yield list(islice(left, number * of_expert)), self._broadcast(name, first, number, owner, shape), first

    def _blocks(self, name: str, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the first expert of each block, their number, and the rank that sends them."""
        most = max(1, BLOCK_BYTES // (math.prod(shape[1:]) * self._dtype.itemsize))
        expert = 0
        while expert < shape[0]:
            owner, end = self._owner(name, expert)
            number = min(most, end - expert, shape[0] - expert)
            yield expert, number, owner
            expert += number

    def _owner(self, name: str, expert: int) -> tuple[int, int]:
        """Return the first rank that has an expert, and the number after the last of its experts."""
        for rank, rows in enumerate(self._rows):
            first, number = rows.get(name, (0, 0))
            if first <= expert < first + number:
                return rank, first + number
        raise AssertionError(f"no rank has expert {expert} of {name}")

    def _broadcast(self, name: str, first: int, number: int, owner: int, shape: Sequence[int]) -> Tensor:
        if owner == dist.get_rank():
            part = self._experts(name, self._own[name], first, number)
            block = part.to(self._device).contiguous()
        else:
            block = torch.empty(number, *shape[1:], dtype=self._dtype, device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(block, owner)
        return block


def _rows_of_all(own: Mapping[str, Tensor]) -> list[dict[str, _Rows]]:
    """Return the rows of each rank's parameters by name; `own` are those of this one. Collective."""
    mine = {name: rows_of(parameter) for name, parameter in own.items()}
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def rows_of(parameter: Tensor) -> _Rows:
    """Return the first row that this rank has of a parameter, and their number."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], shape[0]
