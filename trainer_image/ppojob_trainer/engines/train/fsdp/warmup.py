"""Synthetic batches, on which an engine's layers are compiled before the first step, while vLLM loads.

Called by the engine's `warm_up`, which runs them forward and backward and drops the gradients: parameters, optimizer
and random state do not change.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ppojob_trainer.engines.train.batch import EngineMeta
from ppojob_trainer.protocol import DataProto, Keys, Meta, rollout_batch

__all__ = ["synthetic_batches"]

_READ_BY_LOSSES = (
    Keys.OLD_LOG_PROBS,
    Keys.ROLLOUT_LOG_PROBS,
    Keys.REF_LOG_PROB,
    Keys.ADVANTAGES,
    Keys.VALUES,
    Keys.RETURNS,
)


def synthetic_batches(prompt_tokens: int, response_tokens: int) -> Iterator[DataProto]:
    """Yield two batches of different sizes: torch compiles for one fixed size first, and for any size at the second.

    Neither is larger than a micro-batch of the job may be. They have the fields that log-probs, values and losses read.
    """
    full, half = [0] * prompt_tokens, [0] * max(1, prompt_tokens // 2)
    for prompts in ([full], [full, half]):
        rows = rollout_batch(prompts, [[0] * response_tokens] * len(prompts))
        mask = rows[Keys.RESPONSE_MASK]
        zeros = mask.with_values(torch.zeros(len(mask.values)))
        meta = {Meta.TEMPERATURE: 1.0, EngineMeta.RESPONSE_LENGTH: response_tokens}
        yield DataProto.from_dict(rows | dict.fromkeys(_READ_BY_LOSSES, zeros), meta_info=meta)
