"""decide(job, observed, now) -> Plan: combines the policies. The first that applies wins:

    finished       delete the RayCluster; delete the job after ttlSecondsAfterFinished
    not accepted   set the conditions and wait
    not fetched    fetch models and data into the storage; Failed if that is impossible
    ended          Complete, or Failed after a deadline
    stopped        suspended, evicted or with a new layout: graceful stop of the trainer, then release the pods
    failed         next attempt, or Failed
    otherwise      the next step towards a running trainer

Pure and stateless: everything to remember is in the status. `loop.py` calls it.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import digest_of, layout_of
from ppojob_api.v1alpha1.progress import Activity
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import LastFailure, PPOJobStatus, RayClusterStatus, Retries
from ppojob_operator.plan import EventRecord, Job, Observed, Plan
from ppojob_operator.reconcile import (
    acceptance,
    admission,
    attempts,
    balance,
    completion,
    conditions,
    deadlines,
    fetching,
    layout,
    log_tail,
    lost_pods,
    phase,
    pools,
    progressing,
    restoring,
    retry,
    stall,
    stopping,
    submission,
    ttl,
    upload,
)
from ppojob_operator.reconcile.fetching import Fetch
from ppojob_operator.reconcile.pools import PoolsFinding
from ppojob_operator.reconcile.situation import Failure, Finding, Situation
from ppojob_operator.reconcile.status import owned
from ppojob_operator.reconcile.stopping import Interruption
from ppojob_operator.reconcile.submission import Step

_NOT_ACCEPTED_INTERVAL = 15.0
_STARTING_INTERVAL = 15.0
_ASKING_INTERVAL = 3.0
_RUNNING_INTERVAL = 10.0
_QUEUED_INTERVAL = 30.0
"""Only the message may change; the watch of the RayCluster reports its admission."""
_SOON = 1.0
_AFTER_THE_FETCH = Finding(
    "False", Reason.WAITING_FOR_PODS, "the pods are created when the models and data are in the storage"
)


def decide(job: Job, observed: Observed, now: datetime) -> Plan:
    """Return the plan for a job from what was observed."""
    if job.is_deleting:
        return Plan()
    if completion.is_finished(job.status):
        return _after_the_end(job, observed, now)
    accepted, spec, refusal = acceptance.judge(job, observed), layout.spec_in_force(job), ""
    if accepted.reason == Reason.INVALID_SPEC and job.effective is not None:
        accepted, spec, refusal = acceptance.KEEPS_LAYOUT, job.effective, accepted.message
    if accepted.status != "True" or spec is None:
        return _not_accepted(job, accepted, now)
    desired = job.spec if isinstance(job.spec, PPOJobSpec) and not refusal else None
    situation = Situation(job, spec, observed, now, desired, refusal)
    if desired is not None and layout.is_stop_due(situation):
        # Before the trainer is stopped: a rejected RayCluster would leave the job without pods.
        if observed.dry_run is None:
            return Plan(dry_run=layout.next_cluster(situation, desired))
        if observed.dry_run:
            situation = replace(situation, desired=None, refusal=observed.dry_run)
    return _accepted(situation, accepted)


def _accepted(situation: Situation, accepted: Finding) -> Plan:
    fetch = fetching.judge(situation)
    if fetch is None or fetch.is_done:
        return _fetched(situation, accepted, fetch)
    found = replace(pools.judge(situation), finding=_AFTER_THE_FETCH)
    step = Step(Finding("False", Reason.NOT_SUBMITTED, _AFTER_THE_FETCH.message), apply=fetch.apply)
    findings = {**_findings(situation, accepted, found, step), Condition.SOURCES_FETCHED: fetch.finding}
    if fetch.failure is not None:
        return _failed(situation, findings, fetch.failure, fetch.failure.reason, fetch.failure.message)
    plan = _fetching(situation, findings, found, step)
    # A job that has ended here, by its deadline, fetches nothing any more.
    is_deleted = fetch.is_job_deleted or _is_over(plan)
    return replace(plan, delete_fetch_job=is_deleted and situation.observed.fetch_job is not None)


def _fetching(situation: Situation, findings: dict[str, Finding], found: PoolsFinding, step: Step) -> Plan:
    late = None if stopping.is_paused(situation) else deadlines.judge(situation, found.finding, step)
    if late is not None:
        return _failed(situation, findings, late, late.reason, late.message)
    if interruption := stopping.judge(situation, found, None, is_late=False):
        return _interrupted(situation, findings, step, interruption)
    plan = _plan(situation, _status(situation, findings, found))
    return replace(plan, apply=step.apply, requeue_after=_RUNNING_INTERVAL)


def _is_over(plan: Plan) -> bool:
    return plan.status is not None and "completionTime" in plan.status


def _fetched(situation: Situation, accepted: Finding, fetch: Fetch | None) -> Plan:
    found = pools.judge(situation)
    if lost := lost_pods.judge(situation):
        found = replace(found, finding=lost)
    step = submission.next_step(situation, found)
    findings = _findings(situation, accepted, found, step)
    if fetch is not None:
        findings[Condition.SOURCES_FETCHED] = fetch.finding
    if complete := completion.judge(situation):
        return _final(situation, findings, {Condition.COMPLETE: complete})
    is_paused = stopping.is_paused(situation)
    late = None if is_paused else deadlines.judge(situation, found.finding, step)
    failure = late or _failure(situation)
    if failure is not None and log_tail.is_needed(situation):
        return Plan(read_log_of=situation.submission_id)
    if late is not None:
        return _failed(situation, findings, late, late.reason, late.message)
    delay = None if is_paused else deadlines.delay(situation, found.finding, step)
    if delay is not None:
        findings[Condition.PROGRESSING] = delay
    if interruption := stopping.judge(situation, found, failure, is_late=delay is not None):
        return _interrupted(situation, findings, step, interruption)
    if failure is not None:
        return _attempt_failed(situation, findings, found, failure)
    status, move, restored = _status(situation, findings, found), balance.judge(situation), restoring.judge(situation)
    other_events = (move.event if move else None, restored.event if restored else None, restoring.recreated(situation))
    if move is not None:
        # The next reconcile finds another layout in the spec.
        status = status.model_copy(update={"effective_pools": list(move.pools)})
    plan = _plan(situation, status)
    return replace(
        plan,
        apply=(*step.apply, *((restored.manifest,) if restored else ())),
        stop_submissions=step.stop_submissions,
        submission=step.submission,
        events=(*stall.events(situation), *filter(None, other_events), *plan.events),
        requeue_after=_SOON if move else _interval(situation, found),
    )


def _failure(situation: Situation) -> Failure | None:
    """Return why the attempt has failed. An eviction by the queue is no failure."""
    return None if admission.is_evicted(situation) else attempts.judge(situation) or stall.judge(situation)


def _findings(situation: Situation, accepted: Finding, found: PoolsFinding, step: Step) -> dict[str, Finding]:
    """Return the findings of a job that is neither stopped nor failed."""
    findings: dict[str, Finding | None] = {
        Condition.ACCEPTED: accepted,
        Condition.ADMITTED: admission.judge(situation),
        Condition.POOLS_READY: found.finding,
        Condition.SUBMITTED: step.finding,
        Condition.PROGRESSING: progressing.judge(situation),
        Condition.STALLED: stall.overdue(situation) if situation.submitted_at is not None else None,
        Condition.LAYOUT_APPLIED: layout.finding(situation),
        Condition.MODEL_UPLOADED: upload.judge(situation),
        Condition.SUSPENDED: stopping.resumed(situation),
    }
    return {kind: finding for kind, finding in findings.items() if finding is not None}


def _interrupted(situation: Situation, findings: Mapping[str, Finding], step: Step, interruption: Interruption) -> Plan:
    status = _status(situation, {**findings, **interruption.findings}, interruption.found)
    plan = _plan(situation, status.model_copy(update=dict(interruption.update)))
    return replace(
        plan,
        # A trainer that is stopping may still need a renewed certificate authority; a paused job needs no objects.
        apply=step.apply if situation.submitted_at is not None else (),
        events=(*interruption.events, *plan.events),
        requeue_after=interruption.requeue_after,
    )


def _attempt_failed(
    situation: Situation, findings: Mapping[str, Finding], found: PoolsFinding, failure: Failure
) -> Plan:
    is_whole = found.is_ready or lost_pods.are_replaced(situation)
    verdict = retry.judge(situation, failure, is_cluster_whole=is_whole)
    if verdict.is_final:
        return _failed(situation, findings, failure, verdict.reason, verdict.message)
    restarting = Finding("False", Reason.RESTARTING, verdict.message)
    findings = {**findings, Condition.SUBMITTED: restarting, Condition.PROGRESSING: restarting}
    findings[Condition.STALLED] = stall.stalled(failure)
    status = _status(situation, findings, found).model_copy(
        update={
            "attempt": situation.attempt + 1,
            "submission_id": None,
            "retries": verdict.retries,
            "last_failure": _last_failure(situation, failure),
        }
    )
    if not verdict.keeps_cluster:
        status = status.model_copy(update={"ray_cluster": None})
    plan = _plan(situation, status)
    event = EventRecord(failure.reason, verdict.message, is_warning=True, action=Condition.PROGRESSING)
    return replace(plan, events=(event, *plan.events), requeue_after=_SOON)


def _failed(situation: Situation, findings: Mapping[str, Finding], failure: Failure, reason: str, message: str) -> Plan:
    over = {Condition.FAILED: Finding("True", reason, message)}
    if situation.submitted_at is not None:
        over[Condition.STALLED] = stall.stalled(failure)
    return _final(situation, findings, over, _last_failure(situation, failure))


def _final(
    situation: Situation,
    findings: Mapping[str, Finding],
    over: Mapping[str, Finding],
    last_failure: LastFailure | None = None,
) -> Plan:
    """Finish the job: write the verdict first, then delete the RayCluster."""
    verdict = next(finding for kind, finding in over.items() if kind in (Condition.COMPLETE, Condition.FAILED))
    released = Finding("False", Reason.RELEASED, "the job has ended and its RayCluster was deleted")
    released_pools = pools.released(situation, released)
    ended = Finding("False", verdict.reason, verdict.message)
    findings = {**findings, Condition.POOLS_READY: released, Condition.PROGRESSING: ended, **over}
    if Condition.ADMITTED in findings:
        findings[Condition.ADMITTED] = ended
    for kind in (Condition.LAYOUT_APPLIED, Condition.SUSPENDED):
        if kind not in findings and situation.condition(kind) is not None:
            findings[kind] = ended
    status = _status(situation, findings, released_pools).model_copy(
        update={"completion_time": conditions.format_time(situation.now), "ray_cluster": None}
    )
    if last_failure is not None:
        status = status.model_copy(update={"last_failure": last_failure})
    return replace(_plan(situation, status), requeue_after=_SOON)


def _after_the_end(job: Job, observed: Observed, now: datetime) -> Plan:
    clusters = tuple(cluster.name for cluster in observed.clusters if not cluster.is_deleting)
    expiry = ttl.expiry(job.spec, job.status) if isinstance(job.spec, PPOJobSpec) else None
    if expiry is None:
        return Plan(delete_clusters=clusters)
    seconds = max(0.0, (expiry - now).total_seconds())
    return Plan(delete_clusters=clusters, delete_job=seconds == 0, requeue_after=seconds or None)


def _not_accepted(job: Job, accepted: Finding, now: datetime) -> Plan:
    """Return the plan for a job that cannot be run. A job that an older operator was running fails."""
    findings = {Condition.ACCEPTED: accepted}
    was_admitted = job.status.start_time is not None
    update: dict[str, object] = {"observed_generation": job.generation, "attempt": job.status.attempt or 0}
    if was_admitted and accepted.status == "False":
        findings[Condition.FAILED] = Finding("True", accepted.reason, accepted.message)
        update |= {"completion_time": conditions.format_time(now), "ray_cluster": None}
    merged = conditions.merge(job.status.conditions, findings, job.generation, now)
    update["conditions"] = merged
    if accepted.status == "False" or not was_admitted:
        # A running trainer continues.
        update["phase"] = phase.derive(merged, job.status.attempt or 0)
    status = owned(job.status.model_copy(update=update))
    return Plan(
        status=None if status == owned(job.status) else status,
        events=tuple(conditions.events(job.status.conditions, merged)),
        requeue_after=_NOT_ACCEPTED_INTERVAL,
    )


def _status(situation: Situation, findings: Mapping[str, Finding], found: PoolsFinding) -> PPOJobStatus:
    """Return the operator's part of the status, with the findings."""
    old, job = situation.status, situation.job
    is_due, is_queued = situation.now >= situation.due, admission.is_queued(situation)
    cluster = _cluster_status(situation) if is_due else old.ray_cluster
    return PPOJobStatus(
        operator=old.operator,
        observed_generation=job.generation,
        conditions=conditions.merge(old.conditions, findings, job.generation, situation.now),
        attempt=situation.attempt,
        submission_id=situation.submission_id if findings[Condition.SUBMITTED].status == "True" else None,
        start_time=old.start_time if is_queued else conditions.format_time(situation.start_time),
        active_seconds=stopping.active_seconds(situation) if is_queued else old.active_seconds,
        completion_time=old.completion_time,
        retries=old.retries or Retries(),
        ready=found.ready,
        pools=list(found.pools),
        sources=[],
        metrics=[],
        ray_cluster=cluster,
        last_failure=old.last_failure,
        stop=old.stop,
        queue_name=situation.spec.run_policy.queue_name,
        effective_pools=list(job.moved),
        effective_layout=layout_of(situation.spec) if is_due else old.effective_layout,
    )


def _cluster_status(situation: Situation) -> RayClusterStatus:
    cluster, since = situation.cluster, situation.unreachable_since
    return RayClusterStatus(
        name=situation.cluster_name,
        uid=(cluster.uid or None) if cluster is not None else None,
        dashboard_url=submission.dashboard_address(situation),
        unreachable_since=None if since is None else conditions.format_time(since),
    )


def _plan(situation: Situation, status: PPOJobStatus) -> Plan:
    """Return the plan that writes a status, if it changed, and then deletes other RayClusters."""
    status = status.model_copy(update={"phase": phase.derive(status.conditions, status.attempt or 0)})
    desired = owned(status)
    kept = status.ray_cluster.name if status.ray_cluster else None
    return Plan(
        status=None if desired == owned(situation.status) else desired,
        delete_clusters=tuple(c.name for c in situation.observed.clusters if c.name != kept and not c.is_deleting),
        events=tuple(conditions.events(situation.status.conditions, status.conditions)),
    )


def _last_failure(situation: Situation, failure: Failure) -> LastFailure:
    return LastFailure(
        attempt=situation.attempt,
        reason=failure.reason,
        message=failure.message[:4096],
        exit_code=failure.exit_code,
        log_tail=log_tail.shorten(situation.observed.log_tail),
        layout_digest=digest_of(layout_of(situation.spec)),
        time=conditions.format_time(situation.now),
    )


def _interval(situation: Situation, found: PoolsFinding) -> float:
    """Return the seconds until the next reconcile without a change: no later than the next deadline."""
    if situation.submitted_at is not None:
        progress = situation.status.progress
        is_ending = progress is not None and situation.reported_at and progress.activity == Activity.FINISHED
        interval = _SOON if is_ending else _RUNNING_INTERVAL
    elif admission.is_queued(situation) and situation.cluster is not None:
        return _QUEUED_INTERVAL if admission.knows_why(situation) else _ASKING_INTERVAL
    else:
        interval = _ASKING_INTERVAL if found.is_ready else _STARTING_INTERVAL
    deadline = deadlines.next_deadline(situation, found.finding)
    if deadline is None:
        return interval
    left = (deadline - situation.now) / timedelta(seconds=1)
    return min(interval, max(_SOON, left))
