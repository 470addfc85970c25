"""How a rollout lies in padded tensors: prompts padded on the left, responses on the right (verl's layout).

Worked example: prompts [5, 6, 7] and [8], responses [1, 2] (2 ends it) and [3], P = 3, R = 2, padding token 0:

    prompts         5 6 7      responses       1 2      response_mask   1 1
                    0 0 8                      3 0                      1 0
    input_ids       5 6 7 1 2
                    0 0 8 3 0
    attention_mask  1 1 1 1 1
                    0 0 1 1 0
    position_ids    0 1 2 3 4
                    0 0 0 1 1      clamp(cumsum(attention_mask) - 1, 0): padding on the right repeats the last one

Column P - 1 holds each prompt's last token, so the model's output at columns P-1 .. S-2 speaks about response tokens
0 .. R-1 for every row: `response_part` takes that slice, for log-probs and for values alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.keys import Keys


def rollout_batch(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    log_probs: Sequence[Sequence[float]] | None = None,
) -> dict[str, Tensor]:
    """Lay B prompts and responses out as the padded tensors that `DataProto.from_dict` takes.

    Args:
        prompt_ids: B lists of token ids, none of them empty.
        response_ids: B lists of token ids, without padding; the end token belongs to the response.
        pad_token_id: fills the gaps; no field that matters reads it.
        prompt_length: P; default the longest prompt.
        response_length: R; default the longest response (at least 1).
        log_probs: the rollout engine's log-prob of each response token, in nats.

    Returns:
        prompts, responses, input_ids, attention_mask, position_ids, response_mask and, with `log_probs`,
        rollout_log_probs (0 on padding); see `FIELDS`.

    Raises:
        ProtocolError: a prompt is empty or longer than P, a response longer than R, or the counts differ.
    """
    _check_rows(prompt_ids, response_ids, log_probs)
    width_P = prompt_length if prompt_length is not None else max(map(len, prompt_ids), default=1)
    width_R = response_length if response_length is not None else max([1, *map(len, response_ids)])
    prompts_BP, prompt_mask_BP = _pad(prompt_ids, width_P, pad_token_id, left=True, what="prompt")
    responses_BR, response_mask_BR = _pad(response_ids, width_R, pad_token_id, left=False, what="response")
    attention_mask_BS = torch.cat([prompt_mask_BP, response_mask_BR], dim=1)
    tensors = {
        Keys.PROMPTS: prompts_BP,
        Keys.RESPONSES: responses_BR,
        Keys.INPUT_IDS: torch.cat([prompts_BP, responses_BR], dim=1),
        Keys.ATTENTION_MASK: attention_mask_BS,
        Keys.POSITION_IDS: position_ids_from_mask(attention_mask_BS),
        Keys.RESPONSE_MASK: response_mask_BR,
    }
    if log_probs is not None:
        padded = torch.zeros(len(log_probs), width_R, dtype=torch.float32)
        for row, values in zip(padded, log_probs, strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.float32)
        tensors[Keys.ROLLOUT_LOG_PROBS] = padded
    return tensors


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Return position ids int64 [B, S] for an attention mask [B, S]; see the example above."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def response_part(values: Tensor, response_length: int) -> Tensor:
    """Return the part of [B, S, ...] that speaks about the response tokens: columns -R-1 .. -2, [B, R, ...].

    The output at a token predicts the next one, so it starts at the prompt's last token and stops before the last
    column.
    """
    return values[:, -response_length - 1 : -1]


def responses_to_lists(responses: Tensor, response_mask: Tensor) -> list[list[int]]:
    """Return the B responses [B, R] without padding. For masks with gaps, everything up to the last 1 is kept."""
    width = responses.shape[1]
    ends = (response_mask.bool() * torch.arange(1, width + 1, device=responses.device)).amax(dim=1).tolist()
    return [row[:end] for row, end in zip(responses.tolist(), ends, strict=True)]


def object_array(items: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Return a one-dimensional object array; plain `np.array` would turn lists of equal length into a matrix."""
    values = list(items)
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _check_rows(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]] | None,
) -> None:
    if len(prompt_ids) != len(response_ids):
        raise ProtocolError(f"{len(prompt_ids)} prompts but {len(response_ids)} responses")
    for index, prompt in enumerate(prompt_ids):
        if len(prompt) == 0:
            raise ProtocolError(
                f"prompt {index} is empty: there is no token that could predict the first of the response"
            )
    if log_probs is None:
        return
    for index, (tokens, values) in enumerate(zip(response_ids, log_probs, strict=True)):
        if len(tokens) != len(values):
            raise ProtocolError(f"response {index} has {len(tokens)} tokens but {len(values)} log-probs")


def _pad(rows: Sequence[Sequence[int]], width: int, pad: int, *, left: bool, what: str) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        if len(row) > width:
            raise ProtocolError(f"{what} {index} has {len(row)} tokens, more than the {what} length {width}")
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[index, columns] = torch.tensor(list(row), dtype=torch.int64)
        mask[index, columns] = 1
    return tokens, mask
