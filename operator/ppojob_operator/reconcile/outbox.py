"""Policy: the notifications of a job, in `status.notifications` until the receiver has accepted them.

    transition or Warning Event of a plan ---> one more in `pending`, in the same write of the status
    accepted or dropped by the sender     ---> removed from `pending`, at the job's next reconcile

`notifications.Notifier` calls it for each plan before the plan is executed. The state machine decides what happens;
the two tables here only name the states and events of which a receiver is notified. Pure.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.notification import (
    MAX_PENDING,
    MAX_WARNINGS,
    NotificationsStatus,
    NotificationType,
    PendingNotification,
    RecentWarning,
)
from ppojob_operator.plan import Job, Plan
from ppojob_operator.reconcile.states import Event, State
from ppojob_operator.reconcile.status import format_time, owned
from ppojob_operator.times import parse_time

STATES: Mapping[str, tuple[NotificationType, str]] = {
    State.QUEUED: (NotificationType.QUEUED, Condition.ADMITTED),
    State.RUNNING: (NotificationType.STARTED, Condition.PROGRESSING),
    State.PREEMPTED: (NotificationType.PREEMPTED, Condition.SUBMITTED),
    State.SUSPENDED: (NotificationType.SUSPENDED, Condition.SUSPENDED),
    State.SUCCEEDED: (NotificationType.SUCCEEDED, Condition.COMPLETE),
    State.FAILED: (NotificationType.FAILED, Condition.FAILED),
}
"""States whose beginning is notified, and the condition that says why."""
EVENTS: Mapping[str, NotificationType] = {
    Event.ATTEMPT_FAILED: NotificationType.RETRIED,
    Event.RETRY_REQUESTED: NotificationType.RESTARTED,
}
"""Events that are notified. The Event about condition Progressing in their plans says why."""
REPEATED_AFTER = timedelta(hours=1)
"""A problem may come and go each minute; its `attention` is repeated after this time."""
PASSING = (Reason.INSUFFICIENT_GPUS, Reason.UNSCHEDULABLE)
"""Reasons of Warning Events that need nobody: pods often wait for nodes of an autoscaler."""
_EXPLAINED = (NotificationType.RETRIED, NotificationType.PREEMPTED, NotificationType.FAILED)
"""Types after which the Warning Events of the same plan need no `attention`: they are about the same."""
_MAX_MESSAGE = 1000


class _News(NamedTuple):
    """Type, reason and message of a new notification."""

    type: NotificationType
    reason: str
    message: str


def with_notifications(plan: Plan, job: Job, types: Collection[str], settled: Collection[int], now: datetime) -> Plan:
    """Return the plan with the notifications in its status.

    Args:
        plan: the plan of a reconcile.
        job: the job before it.
        types: the types that the administrator has chosen. Empty: there is no receiver.
        settled: numbers of the notifications that were accepted or dropped.
        now: the time of the reconcile.
    """
    before = job.status.notifications
    known = before or NotificationsStatus()
    kept = [each for each in known.pending if each.number not in settled and each.type in types]
    warnings = {each.reason: each.time for each in known.warnings}
    new = [each for each in _news(plan) if each.type in types and not _is_repeated(each, warnings, now)]
    if before is None and not new:
        return plan
    status = owned(job.status) if plan.status is None else plan.status
    pending = [
        *kept,
        *(_notification(known.number + i, news, job, status, now) for i, news in enumerate(new, start=1)),
    ]
    for news in new:
        if news.type is NotificationType.ATTENTION:
            warnings.pop(news.reason, None)
            warnings[news.reason] = format_time(now)
    after = NotificationsStatus(
        number=known.number + len(new),
        pending=pending[-MAX_PENDING:],
        warnings=[RecentWarning(reason=reason, time=time) for reason, time in warnings.items()][-MAX_WARNINGS:],
    )
    return plan if after == before else replace(plan, status={**status, "notifications": after.to_wire()})


def _news(plan: Plan) -> Iterator[_News]:
    """Yield what the plan has for a receiver, each at most once."""
    found = [*_of_the_transition(plan)]
    yield from found
    if any(news.type in _EXPLAINED for news in found):
        return
    warnings = {event.reason: event.message for event in plan.events if event.is_warning}
    for reason, message in warnings.items():
        if reason not in PASSING:
            yield _News(NotificationType.ATTENTION, reason, message)


def _of_the_transition(plan: Plan) -> Iterator[_News]:
    if kind := EVENTS.get(plan.event):
        said = next(event for event in plan.events if event.action == Condition.PROGRESSING)
        yield _News(kind, said.reason, said.message)
    if plan.next_state == plan.state or plan.status is None:
        return
    if named := STATES.get(plan.next_state):
        said_by = _conditions(plan.status)[named[1]]
        yield _News(named[0], said_by["reason"], said_by["message"])


def _conditions(status: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]]:
    return {condition["type"]: condition for condition in status["conditions"]}


def _is_repeated(news: _News, warnings: Mapping[str, str], now: datetime) -> bool:
    if news.type is not NotificationType.ATTENTION or news.reason not in warnings:
        return False
    return now - parse_time(warnings[news.reason]) < REPEATED_AFTER


def _notification(number: int, news: _News, job: Job, status: Mapping[str, Any], now: datetime) -> PendingNotification:
    progress, checkpoint = job.status.progress, job.status.checkpoint
    return PendingNotification(
        number=number,
        type=news.type,
        reason=news.reason,
        message=news.message[:_MAX_MESSAGE],
        phase=status.get("phase") or "",
        attempt=status.get("attempt") or 0,
        step=None if progress is None else progress.step,
        total_steps=None if progress is None else progress.total_steps or None,
        reward=None if progress is None else progress.reward,
        checkpoint=None if checkpoint is None else checkpoint.path,
        time=format_time(now),
    )
