"""Kopf's watches of PPOJobs, RayClusters and pods, which enqueue the affected job.

`leader_tasks.py` runs `Watches`. This package decides nothing and writes nothing.
"""

from ppojob_operator.handlers.watches import Watches

__all__ = ["Watches"]
