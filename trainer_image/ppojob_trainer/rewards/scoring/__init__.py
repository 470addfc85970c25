"""Runs a reward function over a batch, in processes that can be ended, with a time limit for each response.

    reward worker                     child processes (`child`), without torch
    Scorer: onError  ── Processes ──┬─ compute_score(item 7)
      results in order   limits     ├─ compute_score(item 8)
                         restarts   └─ ...

The worker never runs the user's code itself, so nothing in it can block or end the worker.
"""

from ppojob_trainer.rewards.scoring.scorer import Scorer

__all__ = ["Scorer"]
