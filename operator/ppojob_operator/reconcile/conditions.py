"""Merges the findings of a reconcile into the conditions of the status, and creates the Events of their changes."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.status import ConditionStatus
from ppojob_operator.plan import EventRecord
from ppojob_operator.reconcile.situation import Finding

_ORDER = (
    Condition.ACCEPTED,
    Condition.SOURCES_FETCHED,
    Condition.ADMITTED,
    Condition.POOLS_READY,
    Condition.SUBMITTED,
    Condition.PROGRESSING,
    Condition.STALLED,
    Condition.LAYOUT_APPLIED,
    Condition.MODEL_UPLOADED,
    Condition.SUSPENDED,
    Condition.COMPLETE,
    Condition.FAILED,
)
_MAX_MESSAGE = 4000

_NORMAL_CONDITIONS = {
    (Condition.ACCEPTED, "True"),
    (Condition.SOURCES_FETCHED, "True"),
    (Condition.ADMITTED, "True"),
    (Condition.POOLS_READY, "True"),
    (Condition.SUBMITTED, "True"),
    (Condition.COMPLETE, "True"),
    (Condition.LAYOUT_APPLIED, "True"),
    (Condition.MODEL_UPLOADED, "True"),
    (Condition.SUSPENDED, "True"),
}
_NORMAL_REASONS = {Reason.FETCHING, Reason.QUEUED, Reason.SUSPENDING, Reason.RESUMED, Reason.REALLOCATING}
"""Reasons with a Normal Event, whatever the status."""
_WARNING_REASONS = {
    Reason.INVALID_SPEC,
    Reason.OPERATOR_TOO_OLD,
    Reason.KUBERAY_MISSING,
    Reason.STORAGE_MISSING,
    Reason.STORAGE_UNFIT,
    Reason.KUEUE_MISSING,
    Reason.NOT_QUEUED,
    Reason.PREEMPTED,
    Reason.NODE_LOST,
    Reason.INSUFFICIENT_GPUS,
    Reason.UNSCHEDULABLE,
    Reason.IMAGE_PULL_FAILED,
    Reason.POD_FAILED,
    Reason.OUT_OF_MEMORY,
    Reason.PODS_REFUSED,
    Reason.CLUSTER_REFUSED,
    Reason.CLUSTER_SUSPENDED,
    Reason.DASHBOARD_UNREACHABLE,
    Reason.REPORTS_MISSING,
    Reason.STARTUP_DELAYED,
    Reason.OPERATOR_FAULT,
    Reason.UPLOAD_REFUSED,
    Reason.UPLOAD_FAILED,
}


def merge(
    old: Sequence[ConditionStatus], findings: Mapping[str, Finding], generation: int, now: datetime
) -> list[ConditionStatus]:
    """Return the conditions with the findings merged into them, in a fixed order.

    `lastTransitionTime` changes only with `status`, as in metav1.Condition. A condition without a finding stays, even
    if only a newer operator knows it.
    """
    result = {condition.type: condition for condition in old}
    for kind, finding in findings.items():
        before = result.get(kind)
        is_same = before is not None and before.status == finding.status
        result[kind] = ConditionStatus(
            type=kind,
            status=finding.status,
            reason=finding.reason,
            message=finding.message[:_MAX_MESSAGE],
            last_transition_time=before.last_transition_time if is_same and before else format_time(now),
            observed_generation=generation,
        )
    known = [result[kind] for kind in _ORDER if kind in result]
    return [*known, *(condition for kind, condition in result.items() if kind not in _ORDER)]


def events(old: Sequence[ConditionStatus], new: Sequence[ConditionStatus]) -> Iterator[EventRecord]:
    """Yield an Event for each condition that changed to a status or reason in the tables above."""
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    for condition in new:
        if before.get(condition.type) == (condition.status, condition.reason):
            continue
        state = (condition.type, condition.status)
        is_bad = condition.reason in _WARNING_REASONS or state == (Condition.FAILED, "True")
        if is_bad or condition.reason in _NORMAL_REASONS or state in _NORMAL_CONDITIONS:
            yield EventRecord(condition.reason, condition.message, is_warning=is_bad, action=condition.type)


def format_time(moment: datetime) -> str:
    """Return RFC 3339 in UTC, whole seconds, as metav1.Time has it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
