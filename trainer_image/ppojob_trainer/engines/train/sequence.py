"""Ulysses sequence parallelism: each rank has a slice of the same packed tokens; attention exchanges slices for heads.

    every layer:  its slice of the tokens, all heads  ─ exchange ─▶  all tokens, its part of the heads
                                                       attention
                  its slice of the tokens, all heads  ◀─ exchange ─

Jacobs et al. 2023, arXiv 2309.14509, section 3. Everything except attention works on single tokens, so a rank computes
it for its own slice. Used by `batch` (slices, sums over the group) and `fsdp.attention` (exchanges); `train.mesh`
creates the groups. `fsdp.divisions` refuses heads that cannot be divided, before anything is loaded.

Suffixes: T tokens of a micro-batch, t tokens of a slice (T / size rounded up; the excess is padding), H query heads,
K key heads, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.nn import functional


@dataclass(frozen=True)
class SequencePeers:
    """This rank in its sequence-parallel group, which computes the same micro-batch together."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def cut(self, tokens_T: Tensor, padding: int = 0) -> Tensor:
        """Return this rank's slice [t, ...] of [T, ...], padded with `padding`."""
        width = self.width(tokens_T.shape[0])
        excess = (*(0, 0) * (tokens_T.ndim - 1), 0, width * self.size - tokens_T.shape[0])
        padded = functional.pad(tokens_T, excess, value=padding)
        return padded[self.rank * width : (self.rank + 1) * width]

    def width(self, num_tokens: int) -> int:
        """Tokens of a slice, padding included."""
        return -(-num_tokens // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the group. Each of its ranks computes the same loss from it.

        The backward pass hands the gradient to each rank unchanged: a rank's own values have the derivative of the
        loss, and the gradients of the group are summed together with those of all data-parallel ranks.
        """
        summed: Tensor = _Sum.apply(values, self.group)  # type: ignore[no-untyped-call]
        return summed

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange slices [1, H, t, D] (keys and values [1, K, t, D]) for parts of the heads [1, H / size, T, D].

        Keys are repeated if there are fewer key heads than ranks in the group.
        """
        parts = [self._parts(tensor[0]) for tensor in (query, _repeated(key, self.size), _repeated(value, self.size))]
        numbers = [part.shape[2] for part in parts]
        # [sender, t, heads, D]: one exchange for all three, after which the tokens are in order.
        received: Tensor = _exchange(torch.cat(parts, dim=2), self.group)
        tokens = received.flatten(0, 1)[:num_tokens]
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in torch.split(tokens, numbers, dim=1))
        return query, key, value

    def to_slices(self, output: Tensor) -> Tensor:
        """Exchange [1, T, H / size, D] for this rank's slice of all heads, [1, t, H, D]."""
        tokens = output[0]
        width = self.width(tokens.shape[0])
        padded = functional.pad(tokens, (0, 0, 0, 0, 0, width * self.size - tokens.shape[0]))
        received: Tensor = _exchange(padded.reshape(self.size, width, *tokens.shape[1:]), self.group)
        return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _parts(self, heads: Tensor) -> Tensor:
        """Return [size, t, heads, D] of [heads, t, D]."""
        num_heads, width, numbers = heads.shape
        return heads.transpose(0, 1).reshape(width, self.size, num_heads // self.size, numbers).transpose(0, 1)


def _repeated(tensor: Tensor, size: int) -> Tensor:
    num_heads = tensor.shape[1]
    return tensor if num_heads >= size else tensor.repeat_interleave(size // num_heads, dim=1)


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
