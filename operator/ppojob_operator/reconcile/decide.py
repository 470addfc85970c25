"""decide(job, observed, now) -> Plan: the policies put together, in the order in which they overrule each other.

    finished?   release the RayCluster, delete the job when its time is over
    accepted?   no: say why and wait
    fetched?    no: models and data come into the storage first; refused -> final
    ended?      complete -> final; past a deadline -> final
    stopped?    suspended, or another layout: the trainer is asked to stop in order, then the pods go
    failed?     next attempt or final
    else        the next step towards a running trainer

Pure and without memory: everything that it must remember is in the status. `loop.py` calls it.
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
    hearing,
    layout,
    log_tail,
    losses,
    phase,
    pools,
    restoring,
    retry,
    stall,
    stopping,
    submission,
    ttl,
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
"""Its words may change; that it is let in, the watch of the RayCluster tells."""
_SOON = 1.0
_AFTER_THE_FETCH = Finding(
    "False", Reason.WAITING_FOR_PODS, "the pods are created when the models and data are in the storage"
)


def decide(job: Job, observed: Observed, now: datetime) -> Plan:
    """Return what is to be done about a job, given one look at it."""
    if job.is_going:
        return Plan()
    if completion.is_finished(job.status):
        return _after_the_end(job, observed, now)
    accepted, spec, refusal = acceptance.judge(job, observed), layout.spec_in_force(job), ""
    if accepted.reason == Reason.INVALID_SPEC and job.effective is not None:
        accepted, spec, refusal = acceptance.RUNS_ON, job.effective, accepted.message
    if accepted.status != "True" or spec is None:
        return _not_accepted(job, accepted, now)
    wanted = job.spec if isinstance(job.spec, PPOJobSpec) and not refusal else None
    situation = Situation(job, spec, observed, now, wanted, refusal)
    if wanted is not None and layout.is_stop_due(situation):
        # Before the trainer is stopped for it: a RayCluster that is refused would leave the job without any.
        if observed.dry_run is None:
            return Plan(dry_run=layout.next_cluster(situation, wanted))
        if observed.dry_run:
            situation = replace(situation, wanted=None, refusal=observed.dry_run)
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
    late = None if stopping.is_held(situation) else deadlines.judge(situation, found.finding, step)
    if late is not None:
        return _failed(situation, findings, late, late.reason, late.message)
    if interruption := stopping.judge(situation, found, None, is_late=False):
        return _interrupted(situation, findings, step, interruption)
    plan = _plan(situation, _status(situation, findings, found))
    return replace(plan, apply=step.apply, look_again_after=_RUNNING_INTERVAL)


def _is_over(plan: Plan) -> bool:
    return plan.status is not None and "completionTime" in plan.status


def _fetched(situation: Situation, accepted: Finding, fetch: Fetch | None) -> Plan:
    found = pools.judge(situation)
    if lost := losses.judge(situation):
        found = replace(found, finding=lost)
    step = submission.next_step(situation, found)
    findings = _findings(situation, accepted, found, step)
    if fetch is not None:
        findings[Condition.SOURCES_FETCHED] = fetch.finding
    if complete := completion.judge(situation):
        return _final(situation, findings, {Condition.COMPLETE: complete})
    is_held = stopping.is_held(situation)
    late = None if is_held else deadlines.judge(situation, found.finding, step)
    failure = late or _failure(situation)
    if failure is not None and log_tail.is_wanted(situation):
        return Plan(wanted_log=situation.submission_id)
    if late is not None:
        return _failed(situation, findings, late, late.reason, late.message)
    delay = None if is_held else deadlines.delay(situation, found.finding, step)
    if delay is not None:
        findings[Condition.PROGRESSING] = delay
    if interruption := stopping.judge(situation, found, failure, is_late=delay is not None):
        return _interrupted(situation, findings, step, interruption)
    if failure is not None:
        return _attempt_failed(situation, findings, found, failure)
    status, move, restored = _status(situation, findings, found), balance.judge(situation), restoring.judge(situation)
    told = (move.event if move else None, restored.event if restored else None, restoring.remade(situation))
    if move is not None:
        # The next look finds another layout in the spec.
        status = status.model_copy(update={"effective_pools": list(move.pools)})
    plan = _plan(situation, status)
    return replace(
        plan,
        apply=(*step.apply, *((restored.manifest,) if restored else ())),
        stop_submissions=step.stop_submissions,
        submission=step.submission,
        events=(*stall.told(situation), *filter(None, told), *plan.events),
        look_again_after=_SOON if move else _interval(situation, found),
    )


def _failure(situation: Situation) -> Failure | None:
    """Return why the attempt has failed. Pods that its queue takes away are no failure."""
    return None if admission.is_evicted(situation) else attempts.judge(situation) or stall.judge(situation)


def _findings(situation: Situation, accepted: Finding, found: PoolsFinding, step: Step) -> dict[str, Finding]:
    """Return what is to be said of a job that goes on as it is."""
    findings: dict[str, Finding | None] = {
        Condition.ACCEPTED: accepted,
        Condition.ADMITTED: admission.judge(situation),
        Condition.POOLS_READY: found.finding,
        Condition.SUBMITTED: step.finding,
        Condition.PROGRESSING: hearing.judge(situation),
        Condition.STALLED: stall.overdue(situation) if situation.submitted_at is not None else None,
        Condition.LAYOUT_APPLIED: layout.finding(situation),
        Condition.SUSPENDED: stopping.resumed(situation),
    }
    return {kind: finding for kind, finding in findings.items() if finding is not None}


def _interrupted(situation: Situation, findings: Mapping[str, Finding], step: Step, interruption: Interruption) -> Plan:
    status = _status(situation, {**findings, **interruption.findings}, interruption.found)
    plan = _plan(situation, status.model_copy(update=dict(interruption.update)))
    return replace(
        plan,
        # A trainer that is waited for still needs the certificate authority; of a job that is held nothing is made.
        apply=step.apply if situation.submitted_at is not None else (),
        events=(*interruption.events, *plan.events),
        look_again_after=interruption.look_again_after,
    )


def _attempt_failed(
    situation: Situation, findings: Mapping[str, Finding], found: PoolsFinding, failure: Failure
) -> Plan:
    is_whole = found.is_ready or losses.are_replaced(situation)
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
    told = EventRecord(failure.reason, verdict.message, is_warning=True, action=Condition.PROGRESSING)
    return replace(plan, events=(told, *plan.events), look_again_after=_SOON)


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
    """End the job: the verdict is written first, then the cluster is released."""
    verdict = next(finding for kind, finding in over.items() if kind in (Condition.COMPLETE, Condition.FAILED))
    released = Finding("False", Reason.RELEASED, "the job has ended and its RayCluster was deleted")
    given_back = pools.given_back(situation, released)
    ended = Finding("False", verdict.reason, verdict.message)
    findings = {**findings, Condition.POOLS_READY: released, Condition.PROGRESSING: ended, **over}
    if Condition.ADMITTED in findings:
        findings[Condition.ADMITTED] = ended
    for kind in (Condition.LAYOUT_APPLIED, Condition.SUSPENDED):
        if kind not in findings and situation.condition(kind) is not None:
            findings[kind] = ended
    status = _status(situation, findings, given_back).model_copy(
        update={"completion_time": conditions.format_time(situation.now), "ray_cluster": None}
    )
    if last_failure is not None:
        status = status.model_copy(update={"last_failure": last_failure})
    return replace(_plan(situation, status), look_again_after=_SOON)


def _after_the_end(job: Job, observed: Observed, now: datetime) -> Plan:
    clusters = tuple(cluster.name for cluster in observed.clusters if not cluster.is_going)
    expiry = ttl.expiry(job.spec, job.status) if isinstance(job.spec, PPOJobSpec) else None
    if expiry is None:
        return Plan(delete_clusters=clusters)
    seconds = max(0.0, (expiry - now).total_seconds())
    return Plan(delete_clusters=clusters, delete_job=seconds == 0, look_again_after=seconds or None)


def _not_accepted(job: Job, accepted: Finding, now: datetime) -> Plan:
    """Say why the job cannot be run. One that was running under an older operator ends here."""
    findings = {Condition.ACCEPTED: accepted}
    was_admitted = job.status.start_time is not None
    update: dict[str, object] = {"observed_generation": job.generation, "attempt": job.status.attempt or 0}
    if was_admitted and accepted.status == "False":
        findings[Condition.FAILED] = Finding("True", accepted.reason, accepted.message)
        update |= {"completion_time": conditions.format_time(now), "ray_cluster": None}
    merged = conditions.merge(job.status.conditions, findings, job.generation, now)
    update["conditions"] = merged
    if accepted.status == "False" or not was_admitted:
        # A trainer that runs goes on meanwhile.
        update["phase"] = phase.derive(merged, job.status.attempt or 0)
    status = owned(job.status.model_copy(update=update))
    return Plan(
        status=None if status == owned(job.status) else status,
        events=tuple(conditions.events(job.status.conditions, merged)),
        look_again_after=_NOT_ACCEPTED_INTERVAL,
    )


def _status(situation: Situation, findings: Mapping[str, Finding], found: PoolsFinding) -> PPOJobStatus:
    """Return the status with the findings in it; of the trainer's part nothing is kept or needed."""
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
    """Return the plan that leads to a status: written only if it differs, other RayClusters released after it."""
    status = status.model_copy(update={"phase": phase.derive(status.conditions, status.attempt or 0)})
    wanted = owned(status)
    kept = status.ray_cluster.name if status.ray_cluster else None
    return Plan(
        status=None if wanted == owned(situation.status) else wanted,
        delete_clusters=tuple(c.name for c in situation.observed.clusters if c.name != kept and not c.is_going),
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
    """Return the seconds until the next look, were nothing to happen: no later than the next deadline."""
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
