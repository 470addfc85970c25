"""Divides the tokens of a mixture's blocks over a tensor-parallel group, whose ranks all have the same tokens.

    attention          all tokens, its part of the heads
    router, experts    its slice of the tokens, all experts: those of other ranks by the exchange of `train.expert`
                       the ranks gather the results of all slices

So no token's experts are computed twice, and to routers and experts the group's ranks are like data-parallel ranks.
Narayanan et al. 2021 (arXiv 2104.04473) divide matrices instead; those of an expert are small. A slice may have no
token: its rank takes part in all exchanges, with no rows. Used by `experts`, `routing` and `balance`.

Suffixes: T tokens that all ranks of the group have, t tokens of a slice, D size of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ppojob_trainer.engines.train.fsdp.tensor_parallel import sum_of_parts
from ppojob_trainer.engines.train.mesh import ParallelMesh

__all__ = ["TokenSlices"]


@dataclass(frozen=True)
class TokenSlices:
    """This rank's slice among those of its tensor-parallel group. All but the last slices are equally long."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, parallel: ParallelMesh) -> TokenSlices | None:
        """Return the slices of a rank's group; None without tensor parallelism."""
        mesh = parallel.tensor_mesh
        return None if mesh is None else cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def place(self, num_tokens: int) -> slice:
        """Return the place of this rank's slice; it may be empty."""
        width = self.width(num_tokens)
        return slice(min(self.rank * width, num_tokens), min((self.rank + 1) * width, num_tokens))

    def width(self, num_tokens: int) -> int:
        """Tokens of the longest slice."""
        return -(-num_tokens // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the group; each rank's own values have the gradient of the sum."""
        return sum_of_parts(values, self.group)

    def apply(self, block: nn.Module) -> None:
        """Let a block, which maps hidden states [..., D] of single tokens, compute its slice of them.

        What it returns besides, as in gpt-oss, stays that of the slice: no layer reads it.
        """

        def forward(module: nn.Module, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
            rows_TD = hidden.flatten(0, -2)
            own_tD: Tensor = _Slice.apply(rows_TD, self)  # type: ignore[no-untyped-call]
            found = type(module).forward(module, own_tD.unsqueeze(0))
            computed, *others = found if isinstance(found, tuple) else (found,)
            whole: Tensor = _Whole.apply(computed.squeeze(0), self, len(rows_TD))  # type: ignore[no-untyped-call]
            return (whole.view_as(hidden), *others) if others else whole.view_as(hidden)

        block.forward = MethodType(forward, block)

    def gather(self, rows_tD: Tensor, num_tokens: int) -> Tensor:
        """Return the rows of all slices, [T, D]. Collective."""
        width = self.width(num_tokens)
        padded = functional.pad(rows_tD, (0, 0, 0, width - len(rows_tD)))
        gathered = rows_tD.new_empty(self.size * width, rows_tD.shape[1])
        dist.all_gather_single(gathered, padded.contiguous(), group=self.group)
        return gathered[:num_tokens]


class _Slice(torch.autograd.Function):
    """This rank's rows of a tensor that all ranks have, and so its gradient: that of all rows."""

    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, slices: TokenSlices) -> Tensor:
        ctx.slices, ctx.num_tokens = slices, len(rows_TD)
        return rows_TD[slices.place(len(rows_TD))].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.slices.gather(gradients[0], ctx.num_tokens), None


class _Whole(torch.autograd.Function):
    """All rows, of which this rank has some. All ranks have the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, rows_tD: Tensor, slices: TokenSlices, num_tokens: int) -> Tensor:
        ctx.place = slices.place(num_tokens)
        return slices.gather(rows_tD, num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.place].contiguous(), None, None
