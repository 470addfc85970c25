"""What the measured phases say about the layout: one sentence, or nothing. Pure; called by `main`'s monitor.

It speaks of pools that are idle for more than half of the time, because fewer GPUs there cost no time. It does not
speak of pools that are short of GPUs: that needs a model of how the phases scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["recommend"]

QUIET_BELOW = 0.5
# Fewer GPUs should be busy for most of the time, and not all of it: phases differ from step to step.
BUSY_ENOUGH = 0.9
NUM_STEPS = 10


def recommend(busy_of_steps: Sequence[Mapping[str, float]], gpus: Mapping[str, int]) -> str:
    """Return a sentence about the quietest pool that could do with fewer GPUs; empty where there is none.

    Args:
        busy_of_steps: the busy fraction of each pool, for each of the last steps. The first step of a run is not
            among them: it compiles and allocates.
        gpus: of each pool.
    """
    if not busy_of_steps:
        return ""
    last = busy_of_steps[-NUM_STEPS:]
    means = {pool: sum(step[pool] for step in last) / len(last) for pool in last[-1]}
    for pool, busy in sorted(means.items(), key=lambda item: item[1]):
        wanted = max(1, math.ceil(gpus[pool] * busy / BUSY_ENOUGH))
        if busy < QUIET_BELOW and wanted < gpus[pool]:
            plural = "" if wanted == 1 else "s"
            return f"pool {pool} was {busy:.0%} busy over the last {len(last)} steps: {wanted} GPU{plural} would do"
    return ""
