"""decide(job, observed, now) -> Plan: the job's state, the first event of that state, the next state, and its plan.

    state  = state_of(status)                                           states.py
    event  = the first one of TRANSITIONS[state] that is there          events.py
    next   = TRANSITIONS[state][event]
    plan   = the function of the next state in _PLANS                   this file

Pure and stateless: everything to remember is in the status. `loop.py` calls it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import digest_of, layout_of
from ppojob_api.v1alpha1.progress import Activity
from ppojob_api.v1alpha1.status import LastFailure, PPOJobStatus, RayClusterStatus
from ppojob_operator.plan import EventRecord, Job, Observed, Plan
from ppojob_operator.reconcile import (
    acceptance,
    attempts,
    deadlines,
    failure_policy,
    layout,
    nodes,
    objects,
    pods,
    progress,
    queueing,
    retry,
    suspension,
    usage,
)
from ppojob_operator.reconcile.events import HAS_HAPPENED, Assessment
from ppojob_operator.reconcile.pods import PoolsFinding
from ppojob_operator.reconcile.situation import Failure, Finding, Situation
from ppojob_operator.reconcile.states import STOPS, TRANSITIONS, WITH_TRAINER, Event, State, phase_of
from ppojob_operator.reconcile.status import condition_events, format_time, merge_conditions, owned, recovered
from ppojob_operator.reconcile.suspension import Interruption

_NOT_ACCEPTED_INTERVAL = 15.0
_STARTING_INTERVAL = 15.0
_ASKING_INTERVAL = 3.0
_RUNNING_INTERVAL = 10.0
_QUEUED_INTERVAL = 30.0
"""Only the message may change; the watch of the RayCluster reports its admission."""
_SOON = 1.0
_VERDICTS = (Condition.COMPLETE, Condition.FAILED)


def decide(job: Job, observed: Observed, now: datetime) -> Plan:
    """Return the plan for a job from what was observed."""
    a = Assessment(job, layout.with_own_fields(job, observed), now)
    row = TRANSITIONS[a.state]
    if missing := _missing_observation(a):
        return missing
    event = next(event for event in row if HAS_HAPPENED[event](a))
    make = _EVENT_PLANS.get(event) or _PLANS[row[event]]
    plan = make(a, event)
    if event not in (Event.DELETED, Event.EXPIRED):
        plan = usage.counted(plan, job, observed, now)
    unused = objects.unused_secrets(job, plan)
    return replace(plan, delete_secrets=unused, state=a.state, event=event, next_state=row[event])


def _missing_observation(a: Assessment) -> Plan | None:
    """Return the plan for an observation without which the event is not known, else None."""
    if a.state not in WITH_TRAINER or a.job.is_deleting or a.accepted.status != "True":
        return None
    if a.observed.dry_run is None and a.is_trial_due:
        # A rejected RayCluster would leave the job without pods.
        return Plan(dry_run=layout.next_cluster(a.situation))
    if a.complete or not attempts.is_log_needed(a.situation):
        return None
    has_ended = a.deadline is not None or a.failure is not None
    return Plan(read_log_of=a.situation.submission_id) if has_ended else None


def _deleted(a: Assessment, event: Event) -> Plan:
    return Plan()


def _pending(a: Assessment, event: Event) -> Plan:
    """Return the plan for a job that cannot be run. A job that an older operator was running fails."""
    job, findings = a.job, {**a.template, Condition.ACCEPTED: a.accepted}
    update: dict[str, object] = {"observed_generation": job.generation, "attempt": job.status.attempt or 0}
    if not acceptance.was_accepted(job):
        # The next reconcile reads the template again.
        update["template"] = None
    if event == Event.REFUSED:
        findings[Condition.FAILED] = Finding("True", a.accepted.reason, a.accepted.message)
        update |= {"completion_time": format_time(a.now), "ray_cluster": None}
    findings |= recovered(job, Finding(a.accepted.status, a.accepted.reason, a.accepted.message))
    # A job that has failed has a RayCluster to delete.
    interval = _SOON if event == Event.REFUSED else _NOT_ACCEPTED_INTERVAL
    return replace(_with_conditions(a, findings, update), requeue_after=interval)


def _with_conditions(a: Assessment, findings: Mapping[str, Finding], update: Mapping[str, object]) -> Plan:
    """Return the plan that changes these conditions and fields, and keeps the rest of the status."""
    job = a.job
    merged = merge_conditions(job.status.conditions, findings, job.generation, a.now)
    status = job.status.model_copy(update={**update, "conditions": merged})
    desired = owned(status.model_copy(update={"phase": phase_of(status)}))
    return Plan(
        status=None if desired == owned(job.status) else desired,
        events=tuple(condition_events(job.status.conditions, merged)),
    )


def _fetching(a: Assessment, event: Event) -> Plan:
    assert a.fetch is not None
    if layout.change(a.situation):
        plan = _interrupted(a, suspension.change_layout(a.situation, a.found))
    else:
        plan = _plan(a.situation, _status(a.situation, a.findings, a.found))
        plan = replace(plan, apply=a.step.apply, requeue_after=_RUNNING_INTERVAL)
    return replace(plan, delete_fetch_job=a.fetch.is_job_deleted and a.observed.fetch_job is not None)


def _towards_the_trainer(a: Assessment, event: Event) -> Plan:
    """Return the plan for the next step towards a running trainer, and for a job whose trainer runs."""
    situation, step, found = a.situation, a.step, a.found
    status = _status(situation, a.findings, found)
    move, restored = layout.rebalance(situation), objects.resized(situation) or objects.restored(situation)
    other_events = (move.event if move else None, restored.event if restored else None, objects.recreated(situation))
    if move is not None:
        # The next reconcile finds another layout in the spec.
        status = status.model_copy(update={"effective_pools": list(move.pools)})
    plan = _plan(situation, status)
    return replace(
        plan,
        apply=(*step.apply, *((restored.manifest,) if restored else ())),
        stop_submissions=step.stop_submissions,
        submission=step.submission,
        events=(*progress.stall_events(situation), *filter(None, other_events), *plan.events),
        requeue_after=_SOON if move else _interval(situation, found),
    )


def _restarting(a: Assessment, event: Event) -> Plan:
    """Return the plan between two attempts."""
    situation, found = a.situation, a.found
    if event == Event.ATTEMPT_FAILED:
        return _attempt_failed(a)
    if event == Event.STOPPED:
        return _interrupted(a, suspension.stopped(situation, found, a.failure))
    if event == Event.LAYOUT_CHANGED:
        return _interrupted(a, suspension.change_layout(situation, found))
    if event == Event.ENLARGEMENT_FAILED:
        return _interrupted(a, suspension.revert_balance(situation, found))
    if event == Event.PARTIAL_PODS:
        return _interrupted(a, suspension.release_pods(situation, found))
    return _towards_the_trainer(a, event)


def _stopping(a: Assessment, event: Event) -> Plan:
    return _interrupted(a, suspension.stopping(a.situation, a.found))


def _suspended(a: Assessment, event: Event) -> Plan:
    if event == Event.STOPPED_FOR_SUSPENSION:
        return _interrupted(a, suspension.stopped(a.situation, a.found, a.failure))
    plan = _interrupted(a, suspension.suspended(a.situation))
    is_deleted = a.fetch is not None and a.fetch.is_job_deleted
    return replace(plan, delete_fetch_job=is_deleted and a.observed.fetch_job is not None)


def _failed(a: Assessment, event: Event) -> Plan:
    """Finish a job that has failed."""
    failure, verdict = a.fetch.failure if event == Event.FETCH_FAILED and a.fetch else a.deadline, None
    if event == Event.RETRIES_EXHAUSTED:
        failure, verdict = a.failure, a.verdict
    assert failure is not None
    reason, message = (verdict.reason, verdict.message) if verdict else (failure.reason, failure.message)
    if verdict is None:
        message = f"{message}; {failure_policy.how_to_retry(a.situation)}"
    over = {Condition.FAILED: Finding("True", reason, message)}
    if a.situation.submitted_at is not None:
        over[Condition.STALLED] = progress.stalled(failure)
    plan = _ended(a, over, failure)
    job = a.observed.fetch_job
    # A Job that has failed stays for its log; one that still waits or runs must not go on.
    return replace(plan, delete_fetch_job=a.is_fetching and job is not None and not job.is_over)


def _succeeded(a: Assessment, event: Event) -> Plan:
    assert a.complete is not None
    return _ended(a, {Condition.COMPLETE: a.complete})


def _after_the_end(a: Assessment, event: Event) -> Plan:
    """Return the plan for a finished job: delete its RayClusters, and later the job."""
    clusters = tuple(cluster.name for cluster in a.observed.clusters if not cluster.is_deleting)
    if event == Event.EXPIRED:
        return Plan(delete_clusters=clusters, delete_job=True)
    verdict = next(each for each in a.job.status.conditions if each.type in _VERDICTS and each.status == "True")
    # A refused deletion is shown until nothing is left to delete.
    ended = {} if clusters else recovered(a.job, Finding("False", verdict.reason, verdict.message))
    plan = _with_conditions(a, ended, {}) if ended else Plan()
    expiry = deadlines.expiry(a.job)
    left = None if expiry is None else (expiry - a.now).total_seconds()
    return replace(plan, delete_clusters=clusters, requeue_after=left)


def _rerun(a: Assessment, event: Event) -> Plan:
    """Return the plan that runs an ended job again. The RayClusters of its last run are deleted first."""
    again = retry.rerun(a.job, a.judgement, a.now)
    plan = _with_conditions(a, again.findings, again.update)
    clusters = tuple(cluster.name for cluster in a.observed.clusters if not cluster.is_deleting)
    return replace(
        plan,
        delete_clusters=clusters,
        delete_fetch_job=again.is_fetch_repeated,
        events=(again.event, *plan.events),
        requeue_after=_SOON,
    )


def _rerun_refused(a: Assessment, event: Event) -> Plan:
    answer, said = retry.refused(a.job, a.retry_refusal, a.now)
    return replace(_with_conditions(a, {}, {"retry": answer}), events=(said,), requeue_after=_SOON)


_PlanOf = Callable[[Assessment, Event], Plan]
_PLANS: Mapping[State, _PlanOf] = {
    State.PENDING: _pending,
    State.FETCHING: _fetching,
    State.QUEUED: _towards_the_trainer,
    State.RESTARTING: _restarting,
    State.WAITING_FOR_PODS: _towards_the_trainer,
    State.SUBMITTING: _towards_the_trainer,
    State.TRAINER_SUBMITTED: _towards_the_trainer,
    State.RUNNING: _towards_the_trainer,
    **dict.fromkeys(STOPS.values(), _stopping),
    State.SUSPENDED: _suspended,
    State.SUCCEEDED: _succeeded,
    State.FAILED: _failed,
}
"""The plan by the next state."""
_EVENT_PLANS: Mapping[Event, _PlanOf] = {
    Event.DELETED: _deleted,
    Event.RETRY_REQUESTED: _rerun,
    Event.RETRY_REFUSED: _rerun_refused,
    Event.EXPIRED: _after_the_end,
    Event.ENDED: _after_the_end,
    Event.REFUSED: _pending,
    Event.NOT_JUDGED: _pending,
}
"""The plan of events that need no attempt, whatever the state."""


def _interrupted(a: Assessment, interruption: Interruption) -> Plan:
    situation = a.situation
    status = _status(situation, {**a.findings, **interruption.findings}, interruption.found)
    plan = _plan(situation, status.model_copy(update=dict(interruption.update)))
    return replace(
        plan,
        # A trainer that is stopping may still need a renewed certificate authority; a paused job needs no objects.
        apply=a.step.apply if situation.submitted_at is not None else (),
        events=(*interruption.events, *plan.events),
        requeue_after=interruption.requeue_after,
    )


def _attempt_failed(a: Assessment) -> Plan:
    situation, failure, verdict = a.situation, a.failure, a.verdict
    assert failure is not None
    assert verdict is not None
    restarting = Finding("False", Reason.RESTARTING, verdict.message)
    findings = {**a.findings, Condition.SUBMITTED: restarting, Condition.PROGRESSING: restarting}
    findings[Condition.STALLED] = progress.stalled(failure)
    status = _status(situation, findings, a.found).model_copy(
        update={
            "attempt": situation.attempt + 1,
            "submission_id": None,
            "retries": verdict.retries,
            "last_failure": _last_failure(situation, failure),
            "avoided_nodes": (avoided := nodes.avoided(situation, failure)),
        }
    )
    if not verdict.keeps_cluster or nodes.hosts_pods(situation, avoided):
        status = status.model_copy(update={"ray_cluster": None})
    plan = _plan(situation, status)
    event = EventRecord(failure.reason, verdict.message, is_warning=True, action=Condition.PROGRESSING)
    return replace(plan, events=(event, *plan.events), requeue_after=_SOON)


def _ended(a: Assessment, over: Mapping[str, Finding], failure: Failure | None = None) -> Plan:
    """Finish the job: write the verdict first, then delete the RayCluster."""
    situation = a.situation
    verdict = next(finding for kind, finding in over.items() if kind in _VERDICTS)
    released = Finding("False", Reason.RELEASED, "the job has ended and its RayCluster was deleted")
    released_pools = pods.released(situation, released)
    ended = Finding("False", verdict.reason, verdict.message)
    findings = {**a.findings, Condition.POOLS_READY: released, Condition.PROGRESSING: ended, **over}
    if Condition.ADMITTED in findings:
        findings[Condition.ADMITTED] = ended
    for kind in (Condition.LAYOUT_APPLIED, Condition.SUSPENDED):
        if kind not in findings and situation.condition(kind) is not None:
            findings[kind] = ended
    status = _status(situation, findings, released_pools).model_copy(
        update={"completion_time": format_time(situation.now), "ray_cluster": None}
    )
    if failure is not None:
        update = {"last_failure": _last_failure(situation, failure), "avoided_nodes": nodes.avoided(situation, failure)}
        status = status.model_copy(update=update)
    return replace(_plan(situation, status), requeue_after=_SOON)


def _status(situation: Situation, findings: Mapping[str, Finding], found: PoolsFinding) -> PPOJobStatus:
    """Return the operator's part of the status, with the findings."""
    old, job = situation.status, situation.job
    is_due, is_queued = situation.now >= situation.due, queueing.is_queued(situation)
    cluster = _cluster_status(situation) if is_due else old.ray_cluster
    return PPOJobStatus(
        operator=old.operator,
        observed_generation=job.generation,
        conditions=merge_conditions(old.conditions, findings, job.generation, situation.now),
        attempt=situation.attempt,
        submission_id=situation.submission_id if findings[Condition.SUBMITTED].status == "True" else None,
        start_time=old.start_time if is_queued else format_time(situation.start_time),
        active_seconds=suspension.active_seconds(situation) if is_queued else old.active_seconds,
        completion_time=old.completion_time,
        retries=failure_policy.counted_retries(situation),
        ready=found.ready,
        pools=list(found.pools),
        sources=[],
        metrics=[],
        ray_cluster=cluster,
        last_failure=old.last_failure,
        retry=retry.of_unfinished(job, situation.now),
        stop=old.stop,
        gpu_usage=old.gpu_usage,
        notifications=old.notifications,
        queue_name=situation.spec.run_policy.queue_name,
        template=job.template,
        effective_pools=list(job.moved),
        avoided_nodes=nodes.avoided(situation),
        effective_layout=layout_of(situation.spec) if is_due else old.effective_layout,
    )


def _cluster_status(situation: Situation) -> RayClusterStatus:
    cluster, since = situation.cluster, situation.unreachable_since
    return RayClusterStatus(
        name=situation.cluster_name,
        uid=(cluster.uid or None) if cluster is not None else None,
        dashboard_url=objects.dashboard_address(situation),
        unreachable_since=None if since is None else format_time(since),
        avoided_nodes=list(situation.avoided_nodes) or None,
    )


def _plan(situation: Situation, status: PPOJobStatus) -> Plan:
    """Return the plan that writes a status, if it changed, and then deletes other RayClusters."""
    desired = owned(status.model_copy(update={"phase": phase_of(status)}))
    kept = status.ray_cluster.name if status.ray_cluster else None
    return Plan(
        status=None if desired == owned(situation.status) else desired,
        delete_clusters=tuple(c.name for c in situation.observed.clusters if c.name != kept and not c.is_deleting),
        events=tuple(condition_events(situation.status.conditions, status.conditions)),
    )


def _last_failure(situation: Situation, failure: Failure) -> LastFailure:
    return LastFailure(
        attempt=situation.attempt,
        reason=failure.reason,
        message=failure.message[:4096],
        exit_code=failure.exit_code,
        role=failure.role,
        log_tail=attempts.shorten_log(situation.observed.log_tail),
        layout_digest=digest_of(layout_of(situation.spec)),
        time=format_time(situation.now),
    )


def _interval(situation: Situation, found: PoolsFinding) -> float:
    """Return the seconds until the next reconcile without a change: no later than the next deadline."""
    if situation.submitted_at is not None:
        progress = situation.status.progress
        is_ending = progress is not None and situation.reported_at and progress.activity == Activity.FINISHED
        interval = _SOON if is_ending else _RUNNING_INTERVAL
    elif queueing.is_queued(situation) and situation.cluster is not None:
        return _QUEUED_INTERVAL if queueing.knows_why(situation) else _ASKING_INTERVAL
    else:
        interval = _ASKING_INTERVAL if found.is_ready else _STARTING_INTERVAL
    deadline = deadlines.next_deadline(situation, found.finding)
    if deadline is None:
        return interval
    left = (deadline - situation.now) / timedelta(seconds=1)
    return min(interval, max(_SOON, left))
