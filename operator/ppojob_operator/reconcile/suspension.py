"""Policy: the graceful stop of an attempt. Condition Suspended.

A stop is for a suspension, another layout or an eviction:

    requested --- the trainer gets the request in the reply to its next report, saves a checkpoint, exits ---> stopped
        `-------- the grace period is over: the pods are released, the previous checkpoint counts -----------> stopped

A requested stop cannot be cancelled, because nobody knows whether the trainer has received it. It is followed by a new
attempt, which is no retry, because submissions and the fencing of checkpoints know only attempts. A failure during the
stop counts as a failure.

If the queue evicts the job (`queueing.py`), its pods are deleted at once, delayed by their preStop hook. The attempt
has stopped when they are deleted, and the next attempt waits in the queue.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import layout_of
from ppojob_api.v1alpha1.status import StopStatus
from ppojob_operator.plan import EventRecord
from ppojob_operator.reading import with_nodes
from ppojob_operator.reconcile import layout, pods, queueing
from ppojob_operator.reconcile.pods import PoolsFinding
from ppojob_operator.reconcile.progress import stalled
from ppojob_operator.reconcile.situation import Failure, Finding, Situation
from ppojob_operator.reconcile.status import format_time
from ppojob_operator.times import parse_time

_STOPPING_INTERVAL = 3.0
_SOON = 1.0
_HOW_TO_RESUME = "set spec.runPolicy.suspend to false to resume from its last checkpoint"


@dataclass(frozen=True)
class Interruption:
    """The changes to a reconcile by a suspension, another layout or an eviction."""

    found: PoolsFinding
    findings: Mapping[str, Finding]
    update: Mapping[str, Any]
    """Fields of the status."""
    events: tuple[EventRecord, ...] = field(default=())
    requeue_after: float | None = None


def is_paused(situation: Situation) -> bool:
    """Return whether the job is suspended or queued, without a trainer; no deadline runs then."""
    is_suspended = situation.spec.run_policy.suspend and situation.submitted_at is None
    return is_suspended or queueing.is_queued(situation)


def is_stopped(situation: Situation, failure: Failure | None) -> bool:
    """Return whether a requested stop is complete, or has taken too long.

    A dry run of the next layout that is not answered is repeated until the grace period is over.
    """
    stop = situation.open_stop
    if stop is None:
        return False
    is_late = situation.now >= _deadline(situation, stop)
    return is_late or (_has_ended(situation, failure) and not situation.observed.is_dry_run_unanswered)


def is_graceful(situation: Situation, failure: Failure | None) -> bool:
    """Return whether the trainer has ended because it was asked to stop."""
    return situation.open_stop is not None and failure is not None and failure.reason == Reason.INTERRUPTED


def stopping(situation: Situation, found: PoolsFinding) -> Interruption:
    """Return the changes while a trainer stops. The stop is requested now, unless it was requested before.

    If the layout of the spec is refused, condition LayoutApplied says so instead.
    """
    change = layout.change(situation)
    stop = situation.open_stop or _stop_request(situation)
    deadline = _deadline(situation, stop)
    words = f"attempt {stop.attempt} was asked to save a checkpoint and to stop by {deadline:%H:%M:%S} UTC"
    if stop.reason == Reason.PREEMPTED:
        # Condition Admitted has the queue's message.
        findings = {Condition.SUBMITTED: Finding("True", Reason.PREEMPTED, words)}
    elif stop.reason == Reason.SUSPENDING:
        findings = {Condition.SUSPENDED: Finding("False", Reason.SUSPENDING, words)}
    else:
        findings = {}
    if change or (not findings and not situation.refusal):
        what = f" for another layout ({change})" if change else ""
        findings[Condition.LAYOUT_APPLIED] = Finding("False", Reason.REALLOCATING, f"{words}{what}")
    left = (deadline - situation.now) / timedelta(seconds=1)
    return Interruption(found, findings, {"stop": stop}, requeue_after=max(_SOON, min(_STOPPING_INTERVAL, left)))


def stopped(situation: Situation, found: PoolsFinding, failure: Failure | None) -> Interruption:
    """Return the changes at the end of a stop: the trainer has stopped gracefully, or its grace period is over."""
    stop, limit = situation.open_stop, situation.spec.run_policy.stop_grace_period_seconds
    assert stop is not None
    is_in_time = _has_ended(situation, failure)
    done = stop.model_copy(update={"completion_time": format_time(situation.now)})
    if not is_in_time:
        fault = f"it had not ended {limit} s after it was asked to stop; the run resumes from the previous checkpoint"
        message = f"attempt {stop.attempt} was terminated: {fault}"
        event = EventRecord(Reason.GRACE_PERIOD_EXCEEDED, message, is_warning=True, action=stop.reason)
    elif stop.reason == Reason.PREEMPTED:
        message = f"attempt {stop.attempt} was pre-empted and its pods are deleted; {_resume_message(situation)}"
        event = EventRecord(Reason.PREEMPTED, message, is_warning=False, action=Condition.SUBMITTED)
    else:
        message = f"attempt {stop.attempt} has saved a checkpoint and stopped gracefully"
        event = EventRecord(Reason.TRAINER_STOPPED, message, is_warning=False, action=stop.reason)
    if situation.spec.run_policy.suspend:
        return suspended(situation, done, event)
    # In a queue, the RayCluster keeps its place, and its pods are re-created.
    is_there = queueing.is_evicted(situation) or (is_in_time and found.is_ready)
    keeps_pods = is_there and not layout.needs_other_pods(situation)
    return _next_attempt(situation, found, done, event, keeps_pods=keeps_pods)


def active_seconds(situation: Situation) -> int | None:
    """Return the active time of a job that is suspended or queued; it is written once, when that begins."""
    return round(situation.active_time / timedelta(seconds=1)) or None


def resumed(situation: Situation) -> Finding | None:
    """Return condition Suspended of a job that is not suspended; None: it never was."""
    if situation.condition(Condition.SUSPENDED) is None or situation.spec.run_policy.suspend:
        return None
    return Finding("False", Reason.RESUMED, "the job resumes from its last checkpoint")


def _deadline(situation: Situation, stop: StopStatus) -> datetime:
    return parse_time(stop.time) + timedelta(seconds=situation.spec.run_policy.stop_grace_period_seconds)


def _has_ended(situation: Situation, failure: Failure | None) -> bool:
    """Return whether the trainer has ended because of the stop; an evicted one may end with its pods."""
    return is_graceful(situation, failure) or (queueing.is_evicted(situation) and queueing.has_lost_all(situation))


def _stop_request(situation: Situation) -> StopStatus:
    """Return the stop to request now. One stop serves a suspension and a new layout."""
    if queueing.is_evicted(situation):
        reason = Reason.PREEMPTED
    else:
        reason = Reason.SUSPENDING if situation.spec.run_policy.suspend else Reason.REALLOCATING
    return StopStatus(attempt=situation.attempt, reason=reason, time=format_time(situation.now))


def can_revert_balance(situation: Situation) -> bool:
    """Return whether autoBalance has enlarged a pool."""
    return situation.desired is not None and any(pool.nodes > pool.spec_nodes for pool in situation.job.moved)


def revert_balance(situation: Situation, found: PoolsFinding) -> Interruption:
    """Return the changes that revert to the nodes of the spec, because there is no capacity for an enlarged pool."""
    desired, moved = situation.desired, situation.job.moved
    assert desired is not None
    own = replace(situation, desired=with_nodes(desired, {pool.name: pool.spec_nodes for pool in moved}))
    words = f"{found.finding.reason}: {found.finding.message}"
    message = (
        f"autoBalance reverts to the nodes of the spec ({layout.change(own)}), because there is no capacity for more: "
        f"{words}"
    )
    event = EventRecord(Reason.REBALANCED, message, is_warning=True, action=Condition.LAYOUT_APPLIED)
    back = change_layout(own, found, Reason.STARTUP_DELAYED)
    return replace(back, update={**back.update, "effective_pools": []}, events=(event,))


def release_pods(situation: Situation, found: PoolsFinding) -> Interruption:
    """Return the changes that release the pods of an attempt without a trainer; the next one begins after a pause."""
    now, limit = format_time(situation.now), situation.spec.run_policy.partial_pods_timeout_seconds
    stop = StopStatus(attempt=situation.attempt, reason=Reason.PODS_RELEASED, time=now, completion_time=now)
    message = (
        f"attempt {situation.attempt} has released its pods, because others did not start within {limit} s "
        f"(spec.runPolicy.partialPodsTimeoutSeconds): {found.finding.reason}: {found.finding.message}"
    )
    event = EventRecord(Reason.PODS_RELEASED, message, is_warning=True, action=Condition.POOLS_READY)
    return _next_attempt(situation, found, stop, event, keeps_pods=False)


def change_layout(situation: Situation, found: PoolsFinding, reason: str = Reason.REALLOCATING) -> Interruption:
    """Return the changes for another layout of an attempt without a trainer.

    reason: of the stop in the status.
    """
    now = format_time(situation.now)
    done = StopStatus(attempt=situation.attempt, reason=reason, time=now, completion_time=now)
    words = f"the next attempt gets another layout ({layout.change(situation)})"
    findings = {
        Condition.LAYOUT_APPLIED: Finding("False", Reason.REALLOCATING, words),
        # Not the finding of this reconcile: it may be about to submit a trainer with the old layout.
        Condition.SUBMITTED: Finding("False", Reason.RESTARTING, words),
    }
    keeps_pods = not layout.needs_other_pods(situation)
    is_over = not keeps_pods and _is_used(situation)
    update = _next_update(situation, done if is_over else situation.status.stop, is_over=is_over, keeps_pods=keeps_pods)
    return Interruption(found, findings, update, requeue_after=_SOON)


def _next_attempt(
    situation: Situation, found: PoolsFinding, stop: StopStatus, event: EventRecord, *, keeps_pods: bool
) -> Interruption:
    """Start the next attempt, on the same pods or on new ones."""
    starting = Finding("False", Reason.RESTARTING, f"{event.message}; attempt {situation.attempt + 1} starts")
    findings = {
        Condition.SUBMITTED: starting,
        Condition.PROGRESSING: starting,
        Condition.STALLED: stalled(None),
    }
    update = _next_update(situation, stop, is_over=True, keeps_pods=keeps_pods)
    return Interruption(found, findings, update, (event,), _SOON)


def _next_update(situation: Situation, stop: StopStatus | None, *, is_over: bool, keeps_pods: bool) -> dict[str, Any]:
    update: dict[str, Any] = {"attempt": situation.attempt + is_over, "submission_id": None, "stop": stop}
    if not keeps_pods:
        update["ray_cluster"] = None
    elif situation.desired is not None:
        update["effective_layout"] = layout_of(situation.desired)
    return update


def suspended(situation: Situation, stop: StopStatus | None = None, *events: EventRecord) -> Interruption:
    """Release all pods; the start time stays until the job resumes."""
    is_over = stop is not None or _is_used(situation)
    update: dict[str, Any] = {
        "attempt": situation.attempt + 1 if is_over else situation.attempt,
        "submission_id": None,
        "ray_cluster": None,
        "effective_layout": situation.status.effective_layout,
        "start_time": situation.status.start_time,
        "active_seconds": active_seconds(situation),
    }
    if stop is not None:
        update["stop"] = stop
    words = f"the job is suspended and has no pods: {_HOW_TO_RESUME}"
    held = Finding("False", Reason.SUSPENDED, words)
    findings = {
        Condition.POOLS_READY: held,
        Condition.SUBMITTED: held,
        Condition.PROGRESSING: held,
        Condition.SUSPENDED: Finding("True", Reason.SUSPENDED, words),
    }
    if queueing.is_managed(situation):
        findings[Condition.ADMITTED] = held
    if situation.condition(Condition.STALLED) is not None:
        findings[Condition.STALLED] = stalled(None)
    return Interruption(pods.released(situation, held), findings, update, events)


def _resume_message(situation: Situation) -> str:
    checkpoint = situation.status.checkpoint
    how = f"resumes from its checkpoint of step {checkpoint.step}" if checkpoint is not None else "starts from step 0"
    return f"when it is admitted again, it {how}"


def _is_used(situation: Situation) -> bool:
    """Return whether a RayCluster was created for this attempt; a new one then needs another attempt's name."""
    cluster = situation.status.ray_cluster
    return cluster is not None and cluster.name == situation.own_cluster_name
