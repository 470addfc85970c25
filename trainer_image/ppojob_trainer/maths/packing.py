"""Packed sequences, and cutting a minibatch into micro-batches by a token budget.

Packed: the tokens of all sequences in one row [T], with `cu_seqlens` for varlen attention; no work is spent on padding.
Called by the engines before the model's forward pass.

Worked example: sequences of 5 and 2 tokens give T = 7, position_ids 0 1 2 3 4 0 1, cu_seqlens [0, 5, 7].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppojob_trainer.maths.balancing import karmarkar_karp


@dataclass(frozen=True)
class Packed:
    """Packed sequences.

    input_ids: int64 [T]. position_ids: int64 [T], from 0 in each sequence. cu_seqlens: int32 [B + 1], where each
    sequence begins. labels: int64 [T], the next token of the same sequence; 0 at the last one, whose output nobody
    reads.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    labels: Tensor


def pack(tokens: Tensor, lengths: Tensor) -> Packed:
    """Pack the tokens [T] of sequences of these lengths, int64 [B], one after the other."""
    ids = tokens.long()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    labels = torch.roll(ids, -1)
    # After the roll the last token of a sequence would have the next sequence's first one as its label.
    labels[cu_seqlens[1:].long()[lengths > 0] - 1] = 0
    return Packed(ids, torch.arange(ids.numel(), device=ids.device) - starts, cu_seqlens, labels)


def num_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """How many micro-batches these sequences need so that each keeps to `max_tokens`.

    Every rank asks this for its own sequences, and all take the largest answer: ranks that stop early would leave
    the others waiting in a collective.

    Raises:
        ValueError: a sequence alone is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"sequence {list(lengths).index(longest)} has {longest} tokens, more than the {max_tokens} of a "
            "micro-batch: raise maxTokensPerGPU; times sequenceParallelSize, it must be at least maxPromptLength + "
            "maxResponseLength"
        )
    number = max(1, math.ceil(sum(lengths) / max_tokens))
    while number < len(lengths) and _heaviest(lengths, number) > max_tokens:
        number += 1
    return number


def micro_batches(lengths: Sequence[int], max_tokens: int, number: int | None = None) -> list[list[int]]:
    """Divide sequences into micro-batches of nearly equal tokens, each within `max_tokens`: lists of row indices.

    Args:
        number: exactly how many, none of them empty: the largest `num_micro_batches` of all ranks. Default this
            rank's own.

    Raises:
        ValueError: more micro-batches than sequences (ranks with equally many sequences cannot run into it), or
            fewer than the sequences need.
    """
    needed = num_micro_batches(lengths, max_tokens)
    number = needed if number is None else number
    if not needed <= number <= max(1, len(lengths)):
        raise ValueError(
            f"{number} micro-batches for {len(lengths)} sequences that need {needed} at {max_tokens} tokens each"
        )
    parts = _partition(lengths, number)
    if max(_tokens(lengths, part) for part in parts) > max_tokens:
        # The heuristic can do worse with more parts than with fewer: then cut up the division that fits.
        parts = _partition(lengths, needed)
        while len(parts) < number:
            parts.sort(key=lambda part: (len(part) > 1, _tokens(lengths, part)))
            heaviest = parts.pop()
            parts += [heaviest[: len(heaviest) // 2], heaviest[len(heaviest) // 2 :]]
    return parts


def _partition(lengths: Sequence[int], number: int) -> list[list[int]]:
    return karmarkar_karp([float(length) for length in lengths], number)


def _tokens(lengths: Sequence[int], rows: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


def _heaviest(lengths: Sequence[int], number: int) -> int:
    return max(_tokens(lengths, part) for part in _partition(lengths, number))
