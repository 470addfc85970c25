"""The operator's part of `status`: conditions, their Events, and the numbers for the metrics.

    findings of the policies --- merge_conditions ---> conditions --- condition_events ---> Events
                                                            `--- owned ---> what the operator applies

`decide` writes it in each plan, and `show_fault` after an unexpected exception. The other part of the status belongs to
the trainer's reports and is never written here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_api.v1alpha1.reported import Progress
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import ConditionStatus, GPUUsage, PPOJobStatus
from ppojob_operator.plan import EventRecord, Job, Manifest, Plan
from ppojob_operator.reconcile.situation import Finding
from ppojob_operator.reconcile.states import phase_of, state_of
from ppojob_operator.times import parse_time

_ORDER = (
    Condition.TEMPLATE_RESOLVED,
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
    (Condition.TEMPLATE_RESOLVED, "True"),
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
_SAID_BY_ANOTHER = {(Condition.TEMPLATE_RESOLVED, "False"), (Condition.LAYOUT_APPLIED, Reason.CLUSTER_REFUSED)}
"""No Event is written for these statuses or reasons: Accepted and PoolsReady have the same reason and one Event."""
_NORMAL_REASONS = {Reason.FETCHING, Reason.QUEUED, Reason.SUSPENDING, Reason.RESUMED, Reason.REALLOCATING}
"""Reasons with a Normal Event, whatever the status."""
_WARNING_REASONS = {
    Reason.INVALID_SPEC,
    Reason.TEMPLATE_MISSING,
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
    Reason.API_REQUEST_FAILED,
    Reason.UPLOAD_REFUSED,
    Reason.UPLOAD_FAILED,
}
OWNED = (
    "operator", "observedGeneration", "phase", "conditions", "attempt", "submissionId", "startTime", "activeSeconds",
    "completionTime", "retries", "ready", "rayCluster", "avoidedNodes", "lastFailure", "retry", "stop", "gpuUsage",
    "notifications", "queueName", "template", "effectiveLayout", "effectivePools",
)  # fmt: skip
_OWNED_OF_POOL = ("name", "desiredNodes", "readyNodes", "gpus", "message")
_MAX_WORDS = 500
_NOT_RECONCILED = (Reason.OPERATOR_FAULT, Reason.API_REQUEST_FAILED)
WAITING = (Phase.PENDING, Phase.QUEUED, Phase.STARTING, Phase.RESTARTING)
"""Phases of a job that waits for its trainer. A download is no such wait: it may take hours, and nothing is wrong."""
FINISHED = (Phase.SUCCEEDED, Phase.FAILED)
_WITHOUT_PODS = (Phase.SUSPENDED, *FINISHED)


def merge_conditions(
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


def condition_events(old: Sequence[ConditionStatus], new: Sequence[ConditionStatus]) -> Iterator[EventRecord]:
    """Yield an Event for each condition that changed to a status or reason in the tables above.

    If several conditions have the same reason and message, as Progressing and Failed at the end of a job, only the last
    one has an Event.
    """
    events: dict[tuple[str, str], EventRecord] = {}
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    for condition in new:
        if before.get(condition.type) == (condition.status, condition.reason):
            continue
        state = (condition.type, condition.status)
        if not {state, (condition.type, condition.reason)}.isdisjoint(_SAID_BY_ANOTHER):
            continue
        is_bad = condition.reason in _WARNING_REASONS or state == (Condition.FAILED, "True")
        if is_bad or condition.reason in _NORMAL_REASONS or state in _NORMAL_CONDITIONS:
            event = EventRecord(condition.reason, condition.message, is_warning=is_bad, action=condition.type)
            events[condition.reason, condition.message] = event
    yield from events.values()


def format_time(moment: datetime) -> str:
    """Return RFC 3339 in UTC, whole seconds, as metav1.Time has it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def owned(status: PPOJobStatus) -> dict[str, Any]:
    """Return the operator's part of a status, as JSON."""
    wire = status.to_wire()
    pools = [{name: pool[name] for name in _OWNED_OF_POOL if name in pool} for pool in wire.get("pools", [])]
    part = {name: wire[name] for name in OWNED if name in wire}
    for name in ("effectivePools", "avoidedNodes"):
        if not part.get(name):
            part.pop(name, None)
    return {**part, "pools": pools} if pools else part


def show_fault(job: Job, error: Exception, now: datetime) -> Plan:
    """Return the plan that shows a bug in the operator. It does not read the spec, which may have triggered it."""
    words = f"{type(error).__name__}: {error}"[:_MAX_WORDS]
    message = (
        f"a bug in the operator prevents the reconcile of this job ({words}): report it with the operator's log. "
        "A running trainer continues; the operator retries"
    )
    return _not_reconciled(job, Finding("Unknown", Reason.OPERATOR_FAULT, message), now)


def show_refusal(job: Job, words: str, now: datetime) -> Plan:
    """Return the plan that shows a request of the operator that failed outside the policies' conditions."""
    return _not_reconciled(job, request_failed(words), now)


def request_failed(words: str) -> Finding:
    """Return condition Progressing of a job for which a request of the operator to the API server failed."""
    message = (
        f"a request of the operator failed ({words[:_MAX_WORDS]}): check the operator's permissions, quotas and "
        "webhooks. A running trainer continues; the operator retries"
    )
    return Finding("Unknown", Reason.API_REQUEST_FAILED, message)


def recovered(job: Job, finding: Finding) -> dict[str, Finding]:
    """Return condition Progressing if the last reconcile of the job was not possible, and this one is."""
    known = ((each.type, each.reason) for each in job.status.conditions)
    is_shown = any(kind == Condition.PROGRESSING and reason in _NOT_RECONCILED for kind, reason in known)
    return {Condition.PROGRESSING: finding} if is_shown else {}


def _not_reconciled(job: Job, finding: Finding, now: datetime) -> Plan:
    """Return the plan that sets condition Progressing only, with an Event if this is new."""
    old = job.status
    merged = merge_conditions(old.conditions, {Condition.PROGRESSING: finding}, job.generation, now)
    status = old.model_copy(update={"conditions": merged})
    desired = owned(status.model_copy(update={"phase": phase_of(status)}))
    return Plan(
        status=None if desired == owned(old) else desired,
        events=tuple(condition_events(old.conditions, merged)),
        state=state_of(old),
        next_state=state_of(status),
    )


@dataclass(frozen=True)
class JobState:
    """One job; points in time are seconds since 1970."""

    phase: str
    """One of `constants.Phase`; empty before the first status."""
    ended_at: float | None = None
    """When it finished. None: it has not finished."""
    progress_ratio: float | None = None
    """Completed share of the steps, 0 to 1. None: no trainer has reported."""
    seconds_left: float | None = None
    """Estimated time to the end, while it runs. None: not known."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Number of retries by cause: `user`, `infrastructure`, or `ignored` for those that are not counted."""
    gpus: Mapping[str, float] = field(default_factory=dict)
    """GPUs of all its pools: `desired`, and `ready` of them. Empty: it has no pods."""
    gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """GPU time that the job has held, in seconds: `busy` and `idle`. Empty: none."""
    waiting_since: float | None = None
    """Since when it has waited for a trainer to start. None: it does not wait."""
    last_progress: float | None = None
    """When a report of the running trainer last showed progress. None: it does not run."""
    last_report: float | None = None
    """When the running trainer reported last."""
    is_stalled: bool = False
    """Whether the condition Stalled is true and the job has not finished."""
    unsaved_since: float | None = None
    """Time of the newest checkpoint, or of the last start where that is later. None: it does not run, or saves no
    checkpoints."""
    last_failure: tuple[str, float] | None = None
    """Reason and time of the last failure, of an attempt that was tried again too."""


def job_state(job: Job, written: Manifest | None) -> JobState:
    """Return the state of a job after a reconcile.

    Args:
        job: the job as it was read, with the trainer's reports.
        written: the operator's part of the status, if the reconcile wrote it.
    """
    status = job.status
    if written is not None:
        status = PPOJobStatus.model_validate({**status.to_wire(), **written}, extra="ignore")
    phase, progress = status.phase or "", status.progress
    is_running = phase == Phase.RUNNING and progress is not None
    failure, conditions = status.last_failure, {each.type: each for each in status.conditions}
    return JobState(
        phase=phase,
        ended_at=_seconds(status.completion_time) if phase in FINISHED else None,
        progress_ratio=_ratio(progress),
        seconds_left=progress.eta_seconds if is_running and progress else None,
        retries={} if status.retries is None else _by_cause(status),
        gpus={} if phase in _WITHOUT_PODS else _gpus(status),
        gpu_seconds={} if status.gpu_usage is None else _gpu_seconds(status.gpu_usage),
        waiting_since=_waiting_since(conditions) if phase in WAITING else None,
        last_progress=_seconds(progress.last_change_time) if is_running and progress else None,
        last_report=_seconds(progress.last_update_time) if is_running and progress else None,
        is_stalled=phase not in FINISHED and _is_true(conditions.get(Condition.STALLED)),
        unsaved_since=_unsaved_since(job, status) if is_running else None,
        last_failure=None if failure is None else (failure.reason, parse_time(failure.time).timestamp()),
    )


def _by_cause(status: PPOJobStatus) -> dict[str, int]:
    assert status.retries is not None
    retries = status.retries
    return {"user": retries.user, "infrastructure": retries.infrastructure, "ignored": retries.ignored}


def _ratio(progress: Progress | None) -> float | None:
    if progress is None or progress.total_steps <= 0:
        return None
    return min(progress.step / progress.total_steps, 1.0)


def _gpus(status: PPOJobStatus) -> dict[str, float]:
    known = [(pool.gpus or 0, pool.ready_nodes or 0, pool.desired_nodes or 0) for pool in status.pools]
    ready = sum(gpus * ready / desired for gpus, ready, desired in known if desired)
    return {"desired": sum(gpus for gpus, _, _ in known), "ready": ready}


def _gpu_seconds(usage: GPUUsage) -> dict[str, float]:
    held, idle = (round(3600 * float(hours), 2) for hours in (usage.gpu_hours, usage.idle_gpu_hours))
    return {"busy": round(held - idle, 2), "idle": idle}


def _waiting_since(conditions: Mapping[str, ConditionStatus]) -> float | None:
    """Return when the last trainer, suspension or fetch ended; before the first, when the job was seen."""
    kinds = (Condition.SUBMITTED, Condition.SUSPENDED, Condition.SOURCES_FETCHED)
    ended = [conditions[kind] for kind in kinds if kind in conditions]
    known = ended or [conditions[kind] for kind in (Condition.ACCEPTED,) if kind in conditions]
    return max((parse_time(each.last_transition_time).timestamp() for each in known), default=None)


def _unsaved_since(job: Job, status: PPOJobStatus) -> float | None:
    if not isinstance(job.spec, PPOJobSpec) or job.spec.checkpoint.every_steps == 0:
        return None
    times = (status.start_time, status.checkpoint.time if status.checkpoint else None)
    return max((seconds for seconds in map(_seconds, times) if seconds is not None), default=None)


def _is_true(condition: ConditionStatus | None) -> bool:
    return condition is not None and condition.status == "True"


def _seconds(time: str | None) -> float | None:
    return None if time is None else parse_time(time).timestamp()
