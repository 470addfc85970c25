"""The schedule of the learning rate, by updates. Called by the engines' optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable

from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec, LearningRateSchedule

__all__ = ["learning_rate_factor"]


def learning_rate_factor(training: ActorSpec | CriticSpec, total_steps: int) -> Callable[[int], float]:
    """Return update number (from 0) -> factor of the learning rate.

    Over the warm-up it rises linearly and reaches 1 in the last warm-up update; the first update is not wasted on a
    learning rate of 0. Cosine and Linear then fall to 0 at the end of the run.
    """
    warmup = training.learning_rate_warmup_steps
    kind = training.learning_rate_schedule

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        if kind is LearningRateSchedule.CONSTANT:
            return 1.0
        done = min(1.0, (update - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if kind is LearningRateSchedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
