"""Policy: the stop in order of an attempt that is not to go on as it is: suspended, with another layout, or evicted.

    asked --- the trainer hears of it in the reply to its next report, puts a checkpoint down and ends ---> over
      `------ the grace period is over: the pods go, and the checkpoint before counts --------------------> over

Once asked for, a stop is carried to its end: nobody can know whether the trainer has heard of it. What follows is an
attempt of its own, because a submission and the fence of the checkpoints know attempts only; it is no retry. A failure
on the way stays a failure, and is counted as one. Where the queue takes the pods (evicted), they leave at once, and
their preStop hook holds them meanwhile: the attempt is over when they are gone, and the next one waits in the queue.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import layout_of
from ppojob_api.v1alpha1.status import StopStatus
from ppojob_operator.plan import EventRecord
from ppojob_operator.reconcile import admission, layout, pools, stall
from ppojob_operator.reconcile.conditions import format_time
from ppojob_operator.reconcile.pools import PoolsFinding
from ppojob_operator.reconcile.reading import parse_time
from ppojob_operator.reconcile.situation import Failure, Finding, Situation
from ppojob_operator.reconcile.sizes import with_nodes

_STOPPING_INTERVAL = 3.0
_SOON = 1.0
_HOW_TO_RESUME = "set spec.runPolicy.suspend to false, and it goes on from its last checkpoint"


@dataclass(frozen=True)
class Interruption:
    """What a suspension or another layout means for this look."""

    found: PoolsFinding
    findings: Mapping[str, Finding]
    update: Mapping[str, Any]
    """Fields of the status."""
    events: tuple[EventRecord, ...] = field(default=())
    requeue_after: float | None = None


def is_paused(situation: Situation) -> bool:
    """Return whether the job is suspended or queued and has no trainer: then no deadline runs."""
    is_suspended = situation.spec.run_policy.suspend and situation.submitted_at is None
    return is_suspended or admission.is_queued(situation)


def judge(situation: Situation, found: PoolsFinding, failure: Failure | None, *, is_late: bool) -> Interruption | None:
    """Return what is to be done otherwise than for a job that goes on; None: nothing.

    is_late: the attempt could not be started in time.
    """
    change = layout.change(situation)
    if situation.submitted_at is None:
        if situation.spec.run_policy.suspend:
            return _suspended(situation, None)
        if change:
            return _change_layout(situation, found, change)
        return _revert_balance(situation, found) if is_late and not found.is_ready else None
    return _judge_trainer(situation, found, failure, change)


def _judge_trainer(
    situation: Situation, found: PoolsFinding, failure: Failure | None, change: str
) -> Interruption | None:
    stop = situation.open_stop
    is_graceful = stop is not None and failure is not None and failure.reason == Reason.INTERRUPTED
    if failure is not None and not is_graceful:
        return None
    if stop is None:
        stop = _stop_request(situation, change)
        return _stop_requested(situation, found, stop, change) if stop else None
    if is_graceful or (admission.is_evicted(situation) and admission.has_lost_all(situation)):
        return _stopped(situation, found, stop, "")
    if situation.now >= _deadline(situation, stop):
        limit = situation.spec.run_policy.stop_grace_period_seconds
        return _stopped(situation, found, stop, f"it had not ended {limit} s after it was asked to stop")
    return _stop_requested(situation, found, stop, change)


def active_seconds(situation: Situation) -> int | None:
    """Return what is kept of the active time of a job that is held: written once, when it comes to be held."""
    return round(situation.active_time / timedelta(seconds=1)) or None


def resumed(situation: Situation) -> Finding | None:
    """Return the condition Suspended of a job that goes on; None: it never was suspended."""
    if situation.condition(Condition.SUSPENDED) is None or situation.spec.run_policy.suspend:
        return None
    return Finding("False", Reason.RESUMED, "the job goes on from its last checkpoint")


def _deadline(situation: Situation, stop: StopStatus) -> datetime:
    return parse_time(stop.time) + timedelta(seconds=situation.spec.run_policy.stop_grace_period_seconds)


def _stop_request(situation: Situation, change: str) -> StopStatus | None:
    """Return the stop that is to be asked for now. A suspension waits for the layout too: one stop serves both."""
    if admission.is_evicted(situation):
        reason = Reason.PREEMPTED
    elif situation.spec.run_policy.suspend or change:
        reason = Reason.SUSPENDING if situation.spec.run_policy.suspend else Reason.REALLOCATING
    else:
        return None
    return StopStatus(attempt=situation.attempt, reason=reason, time=format_time(situation.now))


def _stop_requested(situation: Situation, found: PoolsFinding, stop: StopStatus, change: str) -> Interruption:
    deadline = _deadline(situation, stop)
    words = f"attempt {stop.attempt} is asked to put a checkpoint down and to stop, until {deadline:%H:%M:%S} UTC"
    if stop.reason == Reason.PREEMPTED:
        # Of Admitted the queue's own words are said.
        findings = {Condition.SUBMITTED: Finding("True", Reason.PREEMPTED, words)}
    elif stop.reason == Reason.SUSPENDING:
        findings = {Condition.SUSPENDED: Finding("False", Reason.SUSPENDING, words)}
    else:
        what = f" for another layout ({change})" if change else ""
        findings = {Condition.LAYOUT_APPLIED: Finding("False", Reason.REALLOCATING, f"{words}{what}")}
    left = (deadline - situation.now) / timedelta(seconds=1)
    return Interruption(found, findings, {"stop": stop}, requeue_after=max(_SOON, min(_STOPPING_INTERVAL, left)))


def _stopped(situation: Situation, found: PoolsFinding, stop: StopStatus, fault: str) -> Interruption:
    """Go on without the attempt: it has ended in order, or (`fault`) its time is over."""
    done = stop.model_copy(update={"completion_time": format_time(situation.now)})
    if fault:
        message = f"attempt {stop.attempt} is ended: {fault}; the checkpoint before counts"
        event = EventRecord(Reason.GRACE_PERIOD_EXCEEDED, message, is_warning=True, action=stop.reason)
    elif stop.reason == Reason.PREEMPTED:
        message = f"attempt {stop.attempt} was pre-empted and its pods are gone; {_resume_message(situation)}"
        event = EventRecord(Reason.PREEMPTED, message, is_warning=False, action=Condition.SUBMITTED)
    else:
        message = f"attempt {stop.attempt} has put a checkpoint down and ended in order"
        event = EventRecord(Reason.TRAINER_STOPPED, message, is_warning=False, action=stop.reason)
    if situation.spec.run_policy.suspend:
        return _suspended(situation, done, event)
    # In a queue the RayCluster is what has a place; its pods come anew.
    is_there = admission.is_evicted(situation) or (not fault and found.is_ready)
    keeps_pods = is_there and not layout.needs_other_pods(situation)
    return _next_attempt(situation, found, done, event, keeps_pods=keeps_pods)


def _revert_balance(situation: Situation, found: PoolsFinding) -> Interruption | None:
    """Go back to the nodes of the spec where there is no room for the more that autoBalance has given a pool."""
    desired, moved = situation.desired, situation.job.moved
    if desired is None or all(pool.nodes <= pool.spec_nodes for pool in moved):
        return None
    own = replace(situation, desired=with_nodes(desired, {pool.name: pool.spec_nodes for pool in moved}))
    change = layout.change(own)
    words = f"{found.finding.reason}: {found.finding.message}"
    message = f"autoBalance goes back to the nodes of the spec ({change}), because there is no room for more: {words}"
    event = EventRecord(Reason.REBALANCED, message, is_warning=True, action=Condition.LAYOUT_APPLIED)
    back = _change_layout(own, found, change, Reason.STARTUP_DELAYED)
    return replace(back, update={**back.update, "effective_pools": []}, events=(event,))


def _change_layout(
    situation: Situation, found: PoolsFinding, change: str, reason: str = Reason.REALLOCATING
) -> Interruption:
    """Change the layout of an attempt that has not begun; `reason` says in the status what for."""
    now = format_time(situation.now)
    done = StopStatus(attempt=situation.attempt, reason=reason, time=now, completion_time=now)
    relaid = Finding("False", Reason.REALLOCATING, f"the next attempt has another layout ({change})")
    keeps_pods = not layout.needs_other_pods(situation)
    is_over = not keeps_pods and _is_used(situation)
    update = _next_update(situation, done if is_over else situation.status.stop, is_over=is_over, keeps_pods=keeps_pods)
    return Interruption(found, {Condition.LAYOUT_APPLIED: relaid}, update, requeue_after=_SOON)


def _next_attempt(
    situation: Situation, found: PoolsFinding, stop: StopStatus, event: EventRecord, *, keeps_pods: bool
) -> Interruption:
    """Go on with another attempt, on the pods that are there or on new ones."""
    begins = Finding("False", Reason.RESTARTING, f"{event.message}; attempt {situation.attempt + 1} begins")
    findings = {Condition.SUBMITTED: begins, Condition.PROGRESSING: begins, Condition.STALLED: stall.stalled(None)}
    update = _next_update(situation, stop, is_over=True, keeps_pods=keeps_pods)
    return Interruption(found, findings, update, (event,), _SOON)


def _next_update(situation: Situation, stop: StopStatus | None, *, is_over: bool, keeps_pods: bool) -> dict[str, Any]:
    update: dict[str, Any] = {"attempt": situation.attempt + is_over, "submission_id": None, "stop": stop}
    if not keeps_pods:
        update["ray_cluster"] = None
    elif situation.desired is not None:
        update["effective_layout"] = layout_of(situation.desired)
    return update


def _suspended(situation: Situation, stop: StopStatus | None, *events: EventRecord) -> Interruption:
    """Give all pods back; the start time stays until the job goes on."""
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
    if situation.spec.run_policy.queue_name is not None:
        findings[Condition.ADMITTED] = held
    if situation.condition(Condition.STALLED) is not None:
        findings[Condition.STALLED] = stall.stalled(None)
    return Interruption(pools.released(situation, held), findings, update, events)


def _resume_message(situation: Situation) -> str:
    checkpoint = situation.status.checkpoint
    where = f"its checkpoint of step {checkpoint.step}" if checkpoint is not None else "the beginning"
    return f"when it is admitted again, it goes on from {where}"


def _is_used(situation: Situation) -> bool:
    """Return whether the current attempt has a RayCluster of its own: another one needs another name."""
    cluster = situation.status.ray_cluster
    return cluster is not None and cluster.name == situation.own_cluster_name
