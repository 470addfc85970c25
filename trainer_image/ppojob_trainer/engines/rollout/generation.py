"""What an engine returns for a request. This module does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ppojob_trainer.engines.rollout.options import NO_DRAFTS, Drafts


@dataclass(frozen=True)
class Generation:
    """One response: its tokens, their log-probs (nats) under the distribution they were sampled from, why it ended.

    log_probs is None if the sampling options did not request them. drafts: with `rollout.speculative` alone. versions:
    of the weights that sampled each token; None unless the options let weights change in flight. experts: of each token
    of prompt and response but the last, [tokens - 1, layers, experts of a token], uint8 or uint16; None unless the
    sampling options request them.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: str
    drafts: Drafts = NO_DRAFTS
    versions: list[int] | None = None
    experts: np.ndarray[Any, Any] | None = None
