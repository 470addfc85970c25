"""Synthetic batches, on which an engine's layers are compiled before the first step, while vLLM loads.

Called by the engine's `warm_up`, which runs them forward and backward and drops the gradients: parameters, optimizer
and random state do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ppojob_trainer.engines.train.batch import EngineMeta
from ppojob_trainer.protocol import DataProto, Experts, Keys, Meta, rollout_batch

__all__ = ["Recording", "synthetic_batches"]

_READ_BY_LOSSES = (
    Keys.OLD_LOG_PROBS,
    Keys.ROLLOUT_LOG_PROBS,
    Keys.REF_LOG_PROB,
    Keys.ADVANTAGES,
    Keys.VALUES,
    Keys.RETURNS,
)


@dataclass(frozen=True)
class Recording:
    """The experts that are recorded of a token: in each layer, dense ones included, `per_token` of `num_experts`."""

    num_layers: int
    per_token: int
    num_experts: int

    def of(self, num_tokens: int) -> Experts:
        """Return experts, [tokens, layers, experts of a token]; in a layer, all have nearly equally many tokens."""
        dtype = np.uint8 if self.num_experts <= np.iinfo(np.uint8).max + 1 else np.uint16
        tokens, layers, places = np.ogrid[:num_tokens, : self.num_layers, : self.per_token]
        return ((tokens * self.per_token + layers + places) % self.num_experts).astype(dtype)


def synthetic_batches(
    prompt_tokens: int, response_tokens: int, recording: Recording | None = None
) -> Iterator[DataProto]:
    """Yield two batches of different sizes: torch compiles for one fixed size first, and for any size at the second.

    That holds for each size by itself: tokens, sequences, and those of the longest sequence (`Segments.bound`), which
    is a number for the attention's kernel. The first batch is one sequence that is as long as any of the job. They have
    the fields that log-probs, values and losses read.

    Args:
        recording: of the batches' experts; None: they have none.
    """
    half_prompt, half_response = max(1, prompt_tokens // 2), max(1, response_tokens // 2)
    for number, prompt, response in ((1, prompt_tokens, response_tokens), (3, half_prompt, half_response)):
        experts = None if recording is None else [recording.of(prompt + response - 1)] * number
        rows = rollout_batch([[0] * prompt] * number, [[0] * response] * number, experts=experts)
        mask = rows[Keys.RESPONSE_MASK]
        zeros = mask.with_values(torch.zeros(len(mask.values)))
        meta = {Meta.TEMPERATURE: 1.0, EngineMeta.RESPONSE_LENGTH: response_tokens}
        yield DataProto.from_dict(rows | dict.fromkeys(_READ_BY_LOSSES, zeros), meta_info=meta)
