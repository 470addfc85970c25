"""How a rollout lies in columns without padding.

Worked example: prompts [5, 6, 7] and [8], responses [1, 2] (2 ends it) and [3]:

    input_ids      5 6 7 1 2 | 8 3         lengths 5, 2
    response_mask        1 1 |   1         lengths 2, 1
    routed_experts 4 of them | 1           times the layers, times the experts of a token

The output at a token predicts the next one, so log-probs and values of the response are computed at the positions from
the prompt's last token to the last but one of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.keys import Keys
from ppojob_trainer.protocol.ragged import Ragged

Experts: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def rollout_batch(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]] | None = None,
    versions: Sequence[Sequence[int]] | None = None,
    experts: Sequence[Experts] | None = None,
) -> dict[str, Ragged]:
    """Return B prompts and responses as the columns that `DataProto.from_dict` takes.

    Args:
        prompt_ids: B lists of token ids, none of them empty.
        response_ids: B lists of token ids; the end token belongs to the response.
        log_probs: the rollout engine's log-prob of each response token, in nats.
        versions: of the weights that sampled each response token.
        experts: that the engine chose for each token of prompt and response but the last, [tokens - 1, layers, experts
            of a token], uint8 or uint16.

    Returns:
        input_ids, response_mask and, with `log_probs`, `versions` and `experts`, rollout_log_probs, rollout_versions
        and routed_experts; see `FIELDS`.

    Raises:
        ProtocolError: a prompt is empty, or the counts differ.
    """
    _check_rows(prompt_ids, response_ids, {"log-probs": log_probs, "versions": versions})
    sequences = [[*prompt, *response] for prompt, response in zip(prompt_ids, response_ids, strict=True)]
    lengths = torch.tensor([len(response) for response in response_ids], dtype=torch.int64)
    tensors = {
        Keys.INPUT_IDS: Ragged.from_rows(sequences, torch.int32),
        Keys.RESPONSE_MASK: Ragged(torch.ones(int(lengths.sum()), dtype=torch.bool), lengths),
    }
    if log_probs is not None:
        tensors[Keys.ROLLOUT_LOG_PROBS] = Ragged.from_rows(log_probs, torch.float32)
    if versions is not None:
        tensors[Keys.ROLLOUT_VERSIONS] = Ragged.from_rows(versions, torch.int32)
    if experts is not None:
        tensors[Keys.ROUTED_EXPERTS] = _experts_column(sequences, experts)
    return tensors


def _experts_column(sequences: Sequence[Sequence[int]], experts: Sequence[Experts]) -> Ragged:
    for index, (sequence, recorded) in enumerate(zip(sequences, experts, strict=True)):
        if len(recorded) != len(sequence) - 1:
            raise ProtocolError(
                f"sequence {index} has {len(sequence)} tokens but experts of {len(recorded)}: all but the "
                "last have some"
            )
    rows = [recorded.reshape(-1) for recorded in experts]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = np.concatenate(rows)
    # torch has few operations on uint16, and no model has more experts than int16 counts.
    return Ragged(torch.from_numpy(values if values.dtype == np.uint8 else values.astype(np.int16)), lengths)


def responses_to_lists(responses: Ragged, response_mask: Ragged) -> list[list[int]]:
    """Return the B responses up to the last token that the policy generated; masks may have gaps."""
    places = (response_mask.place_of + 1) * response_mask.values
    ends = torch.zeros(len(responses), dtype=torch.int64).scatter_reduce(0, response_mask.row_of, places, "amax")
    return [row[:end] for row, end in zip(responses.to_lists(), ends.tolist(), strict=True)]


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
    of_tokens: Mapping[str, Sequence[Sequence[float]] | None],
) -> None:
    if len(prompt_ids) != len(response_ids):
        raise ProtocolError(f"{len(prompt_ids)} prompts but {len(response_ids)} responses")
    for index, prompt in enumerate(prompt_ids):
        if len(prompt) == 0:
            raise ProtocolError(
                f"prompt {index} is empty: there is no token that could predict the first of the response"
            )
    for what, column in of_tokens.items():
        for index, (tokens, values) in enumerate(zip(response_ids, column, strict=True) if column is not None else ()):
            if len(tokens) != len(values):
                raise ProtocolError(f"response {index} has {len(tokens)} tokens but {len(values)} {what}")
