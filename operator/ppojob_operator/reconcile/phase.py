"""`status.phase`, derived from the conditions only, for the column in kubectl."""

from collections.abc import Sequence

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.status import ConditionStatus

_STOPS = (Condition.LAYOUT_APPLIED, Condition.SUSPENDED)
"""Conditions with the reason of a graceful stop."""


_QUEUES = {Reason.QUEUED: Phase.QUEUED, Reason.PREEMPTED: Phase.SUSPENDING}
"""Phase by the reason of condition Admitted."""


def derive(conditions: Sequence[ConditionStatus], attempt: int) -> str:
    """Return the phase."""
    true = {condition.type for condition in conditions if condition.status == "True"}
    if Condition.FAILED in true:
        return Phase.FAILED
    if Condition.COMPLETE in true:
        return Phase.SUCCEEDED
    if Condition.ACCEPTED not in true:
        return Phase.PENDING
    if Condition.SUSPENDED in true:
        return Phase.SUSPENDED
    return _on_the_way(conditions, true, attempt)


def _on_the_way(conditions: Sequence[ConditionStatus], true: set[str], attempt: int) -> str:
    if any((each.type, each.reason) == (Condition.SOURCES_FETCHED, Reason.FETCHING) for each in conditions):
        return Phase.FETCHING
    reasons = {condition.reason for condition in conditions if condition.type in _STOPS}
    if Reason.SUSPENDING in reasons:
        return Phase.SUSPENDING
    if Reason.REALLOCATING in reasons:
        return Phase.RESTARTING
    queue = next((c.reason for c in conditions if c.type == Condition.ADMITTED), "")
    if queue in _QUEUES:
        return _QUEUES[queue]
    if Condition.SUBMITTED in true:
        unknown = any(c.type == Condition.PROGRESSING and c.status == "Unknown" for c in conditions)
        return Phase.RUNNING if Condition.PROGRESSING in true or unknown else Phase.STARTING
    return Phase.RESTARTING if attempt > 0 else Phase.STARTING
