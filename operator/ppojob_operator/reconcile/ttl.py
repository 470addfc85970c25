"""Policy: when a finished job is deleted (`ttlSecondsAfterFinished`)."""

from datetime import datetime, timedelta

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_operator.reconcile.reading import parse_time


def expiry(spec: PPOJobSpec, status: PPOJobStatus) -> datetime | None:
    """Return when the finished job is deleted; None: never."""
    seconds = spec.run_policy.ttl_seconds_after_finished
    if seconds is None or status.completion_time is None:
        return None
    return parse_time(status.completion_time) + timedelta(seconds=seconds)
