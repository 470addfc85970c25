"""Rows of tokens in another order: one row for each choice of a token, sorted by what is chosen, and back again.

    tokens [T, D]  ─ spread ─▶  rows [S, D], sorted by expert or by rank
    tokens [T, D]  ◀─ collect ─  each token's rows are summed

Each is the gradient of the other, so a backward pass sorts nothing and adds no rows at random places: PyTorch's own
gradient of `rows[index]` sorts the index again, and that of `index_select` sums in an order that changes. The sums
here are in float32, in the order of the choices, and rounded once. Used by `experts`; on CUDA, `experts_cuda` has
kernels for both.

Suffixes: T tokens, C choices of a token, S rows, D size of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Rows", "collect", "kernels", "spread"]


@dataclass(frozen=True)
class Rows:
    """Which rows the tokens have, all int64.

    choices: of each row, its choice among those of all tokens [S]. tokens: its token [S]. of_tokens: the rows in the
    order of their tokens [S]. starts: of each token, its first place in `of_tokens` [T].
    """

    choices: Tensor
    tokens: Tensor
    of_tokens: Tensor
    starts: Tensor

    @classmethod
    def sorted_by(cls, keys_TC: Tensor, num_keys: int) -> Rows:
        """Return all choices as rows, sorted by key, those of a key in the order of the tokens. The host waits for
        nothing: `first` leaves out what has no row.

        Args:
            keys_TC: integers [T, C]; choices with a key of `num_keys` have no row, and come last.
        """
        num_choices = keys_TC.shape[1]
        keys = keys_TC.flatten()
        # A radix sort takes as many passes as a key has bytes.
        order = keys.to(torch.int16 if num_keys < torch.iinfo(torch.int16).max else torch.int32).argsort(stable=True)
        ends = (keys < num_keys).cumsum(0)
        rows = torch.arange(len(keys), device=keys.device)
        places = torch.where(rows < ends[-1:], ends[order] - 1, rows)
        of_tokens = torch.empty_like(order).scatter_(0, places, rows)
        ends_T = ends.view(-1, num_choices)[:, -1]
        return cls(order, order // num_choices, of_tokens, functional.pad(ends_T[:-1], (1, 0))[: len(ends_T)])

    def first(self, num_rows: int) -> Rows:
        """Return the first rows alone: as many as choices have one. Copies, because a view keeps the others too."""
        choices, tokens, of_tokens = (each[:num_rows].clone() for each in (self.choices, self.tokens, self.of_tokens))
        return Rows(choices, tokens, of_tokens, self.starts)


def spread(tokens_TD: Tensor, rows: Rows) -> Tensor:
    """Return each row's token, [S, D]. Differentiable."""
    found: Tensor = _Spread.apply(tokens_TD, rows.tokens, rows.of_tokens, rows.starts)  # type: ignore[no-untyped-call]
    return found


def collect(rows_SD: Tensor, rows: Rows) -> Tensor:
    """Return the sum of each token's rows, [T, D]; 0 if it has none. Differentiable."""
    found: Tensor = _Collect.apply(rows_SD, rows.tokens, rows.of_tokens, rows.starts)  # type: ignore[no-untyped-call]
    return found


def kernels(tensor: Tensor) -> ModuleType | None:
    """Return the module with the GPU's kernels, or None where PyTorch's operations compute."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    from ppojob_trainer.engines.train.fsdp import experts_cuda

    return experts_cuda


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor, tokens: Tensor, of_tokens: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(of_tokens, starts)
        return _take(tokens_TD, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _sums(gradients[0], *ctx.saved_tensors), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, tokens: Tensor, of_tokens: Tensor, starts: Tensor) -> Tensor:
        # Not by `save_for_backward`: gradient checkpointing computes a layer again until it has the last saved tensor.
        # So it leaves out the experts' last product and the messages after it, if the layer saves nothing else. The
        # recomputation must choose the same experts, because the other rows of the layer are those of its choice.
        ctx.tokens = tokens
        return _sums(rows_SD, of_tokens, starts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _take(gradients[0], ctx.tokens), None, None, None


def _take(tokens_TD: Tensor, tokens: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or (found := kernels(tokens_TD)) is None:
        return tokens_TD.index_select(0, tokens)
    rows: Tensor = found.take(tokens_TD.contiguous(), tokens)
    return rows


def _sums(rows_SD: Tensor, of_tokens: Tensor, starts: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # Compiled experts are not divided, so each token has as many rows; torch.compile makes one kernel of this.
        return rows_SD[of_tokens].view(len(starts), -1, rows_SD.shape[1]).sum(dim=1)
    if (found := kernels(rows_SD)) is not None:
        sums: Tensor = found.sums(rows_SD.contiguous(), of_tokens, starts)
        return sums
    # Sums of rows of a table, which is what an embedding of bags of words is.
    return functional.embedding_bag(of_tokens, rows_SD, starts, mode="sum")
