"""Sequence parallelism: each rank has a slice of the same packed tokens; attention needs those of the others.

Two axes divide the tokens, Ulysses inside context parallelism; either may have one rank:

    every layer:  a slice of the tokens, all heads       ─ exchange over heads ─▶  its context rank's tokens, some heads
                  keys and values of these tokens        ─ gather over context ─▶  those of all tokens
                                                           attention
                  a slice of the tokens, all heads       ◀─ exchange over heads ─  its context rank's tokens, some heads

Jacobs et al. 2023, arXiv 2309.14509, section 3 (Ulysses). Everything except attention works on single tokens, so a rank
computes it for its own slice. `context` says which tokens a context rank has. Used by `batch` (slices, sums over the
group) and `fsdp.attention` (exchanges, gathers); `train.mesh` creates the groups. The sizes divide the heads, see
`dims.heads_and_context`.

Suffixes: T tokens of a micro-batch, t tokens of a slice (padding included), W tokens of a context rank (without context
parallelism T), S keys that its queries attend to, H query heads, K key heads, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, all_to_all_single, wait_tensor
from torch.nn import functional

from ppojob_trainer.engines.train.context import Chunks


@dataclass(frozen=True)
class Peers:
    """This rank in a group of ranks."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class SequencePeers:
    """This rank among those that compute the same micro-batch together.

    slices: all of them. heads: those that exchange slices for heads; None: it has all heads. context: those that gather
    keys and values; None: it has those of all tokens.
    """

    slices: Peers
    heads: Peers | None = None
    context: Peers | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of all its collectives."""
        return [peers.group for peers in (self.slices, self.heads, self.context) if peers is not None]

    def cut(self, tokens_T: Tensor, padding: int = 0) -> Tensor:
        """Return this rank's slice [t, ...] of [T, ...], padded with `padding`."""
        num_tokens = tokens_T.shape[0]
        excess = (*(0, 0) * (tokens_T.ndim - 1), 0, self.width(num_tokens) * self.slices.size - num_tokens)
        return functional.pad(tokens_T, excess, value=padding)[self.places(num_tokens)]

    def width(self, num_tokens: int) -> int:
        """Tokens of a slice, padding included. With context parallelism they are even: a rank has two chunks."""
        unit = 1 if self.context is None else 2
        return -(-num_tokens // (self.slices.size * unit)) * unit

    def chunks(self, num_tokens: int) -> Chunks:
        """Return the chunks of the context ranks."""
        assert self.context is not None, "there are chunks with context parallelism alone"
        return Chunks(self.context.size, self.width(num_tokens) * self.slices.size // (2 * self.context.size))

    def places(self, num_tokens: int) -> Tensor:
        """Return the places of this rank's slice among the padded tokens, ascending: int64 [t]."""
        width = self.width(num_tokens)
        if self.context is None:
            return torch.arange(width) + self.slices.rank * width
        chunks = self.chunks(num_tokens).of(self.context.rank)
        of_context = torch.cat([torch.arange(first, last) for first, last in chunks])
        first = 0 if self.heads is None else self.heads.rank * width
        return of_context[first : first + width]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all slices. Each of the ranks computes the same loss from it.

        The backward pass hands the gradient to each rank unchanged: a rank's own values have the derivative of the
        loss, and the gradients of the group are summed together with those of all data-parallel ranks.
        """
        summed: Tensor = _Sum.apply(values, self.slices.group)  # type: ignore[no-untyped-call]
        return summed

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange slices [1, H, t, D] (keys and values [1, K, t, D]) for parts of the heads [1, H / size, W, D].

        Args:
            num_tokens: W.
        """
        if self.heads is None:
            return query, key, value
        parts = [_parts(tensor[0], self.heads.size) for tensor in (query, key, value)]
        numbers = [part.shape[2] for part in parts]
        # [sender, t, heads, D]: one exchange for all three, after which the tokens are in order.
        received: Tensor = _exchange(torch.cat(parts, dim=2), self.heads.group)
        tokens = received.flatten(0, 1)[:num_tokens]
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in torch.split(tokens, numbers, dim=1))
        return query, key, value

    def of_heads(self, numbers_H: Tensor) -> Tensor:
        """Return those of the heads that this rank has after `to_heads`, [H / size]."""
        return numbers_H if self.heads is None else numbers_H.chunk(self.heads.size)[self.heads.rank]

    def gather(self, key: Tensor, value: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather keys and values [1, K, W, D] of all context ranks; return those of the places, [1, K, S, D].

        The backward pass sums up their gradients over the ranks.

        Args:
            places: see `context.Attended`; None without context parallelism.
        """
        if self.context is None or places is None:
            return key, value
        both = torch.cat([key[0].transpose(0, 1), value[0].transpose(0, 1)], dim=1)
        sent = all_gather_single(both, 0, self.context.group)
        received: Tensor = wait_tensor(sent)  # type: ignore[no-untyped-call]
        # Each key has at most two queries' chunks of a rank, so the order of the sum of its gradients does not matter.
        key, value = received.index_select(0, places).transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        return key, value

    def to_slices(self, output: Tensor) -> Tensor:
        """Exchange [1, W, H / size, D] for this rank's slice of all heads, [1, t, H, D]."""
        if self.heads is None:
            return output
        tokens, size = output[0], self.heads.size
        width = -(-tokens.shape[0] // size)
        padded = functional.pad(tokens, (0, 0, 0, 0, 0, width * size - tokens.shape[0]))
        received: Tensor = _exchange(padded.reshape(size, width, *tokens.shape[1:]), self.heads.group)
        return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _parts(heads: Tensor, size: int) -> Tensor:
    """Return [size, t, heads, D] of [heads, t, D]."""
    num_heads, width, numbers = heads.shape
    return heads.transpose(0, 1).reshape(width, size, num_heads // size, numbers).transpose(0, 1)


def _exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part i of dimension 0 to rank i; part i of the result came from rank i. Differentiable, and compiled."""
    sent = all_to_all_single(tensor.contiguous(), None, None, group)
    received: Tensor = wait_tensor(sent)  # type: ignore[no-untyped-call]
    return received


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
