"""Policy: when the end of the trainer's log is needed, and how much of it fits into the status."""

from ppojob_api.v1alpha1.constants import MAX_LOG_LINE_LENGTH, MAX_LOG_LINES
from ppojob_operator.reconcile.situation import Situation

_MAX_LENGTH = 32_000


def is_needed(situation: Situation) -> bool:
    """Return whether the log of the current attempt can be read and was not read yet."""
    ray = situation.observed.ray
    is_there = ray is not None and not ray.problem and situation.ray_job is not None
    return is_there and situation.observed.log_tail is None


def shorten(log: str | None) -> str | None:
    """Return the last lines of a log, each truncated, without the oldest until the rest fits. None stays None."""
    if log is None:
        return None
    lines = [line[:MAX_LOG_LINE_LENGTH] for line in log.splitlines()[-MAX_LOG_LINES:]]
    while lines and sum(len(line) + 1 for line in lines) > _MAX_LENGTH:
        lines.pop(0)
    return "\n".join(lines) or None
