"""A batch as transformers' models take it: prompts padded on the left, responses on the right."""

from __future__ import annotations

import torch
from torch import Tensor

from ppojob_trainer.protocol import DataProto, Keys, Ragged


def padded_inputs(batch: DataProto, width: int | None = None) -> dict[str, Tensor]:
    """Return the arguments of a model's forward pass, int64 [B, S] each: S is the longest prompt and R.

    Args:
        width: R; None: the longest response.
    """
    prompts, responses = batch.prompts(), batch.responses()
    ones = [column.with_values(torch.ones(len(column.values), dtype=torch.int64)) for column in (prompts, responses)]
    mask = torch.cat([_on_the_left(ones[0]), ones[1].padded(width)], dim=1)
    ids = torch.cat([_on_the_left(prompts), responses.padded(width)], dim=1).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(dim=-1) - 1).clamp(min=0)}


def padded_responses(batch: DataProto, width: int | None = None) -> Tensor:
    """Return the response tokens, int64 [B, R]."""
    return batch.responses().padded(width).long()


def response_part(values: Tensor, width: int) -> Tensor:
    """Return the part of a model's output [B, S, ...] that predicts the response tokens, [B, R, ...]."""
    return values[:, -width - 1 : -1]


def unpadded(batch: DataProto, padded: Tensor) -> Ragged:
    """Return a tensor [B, R] as a column of the response tokens."""
    return batch.ragged(Keys.RESPONSE_MASK).unpadded(padded)


def _on_the_left(column: Ragged) -> Tensor:
    padded = column.padded()
    return torch.stack(
        [row.roll(int(padded.shape[1] - length)) for row, length in zip(padded, column.lengths, strict=True)]
    )
