"""Policy: a job that has ended runs again on request: `kubectl ppo retry`, the annotation ppojob.dev/retry-request.

    Failed or Complete --- a new value of the annotation ---> the next attempt, from the last checkpoint
                                `--- refused: status.retry.refusal says why

A request is answered once, when its value is in `status.retry`. One that is there before the job has ended is answered
without an effect, so that no old request starts a job that fails later. The budget of `backoffLimit` and the time of
`activeDeadlineSeconds` begin again; the totals of `status.retries` stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import ConditionStatus, PPOJobStatus, Retries, RetryStatus
from ppojob_operator.plan import EventRecord, Job
from ppojob_operator.reconcile.failure_policy import REMEDY
from ppojob_operator.reconcile.situation import Finding
from ppojob_operator.reconcile.status import format_time

_STILL_RUNS = "the job had not ended when the request came"


@dataclass(frozen=True)
class Rerun:
    """The changes that let a job run again that has ended."""

    findings: Mapping[str, Finding]
    update: Mapping[str, Any]
    """Fields of the status."""
    event: EventRecord
    is_fetch_repeated: bool
    """The Job that fetches models and data has failed, and must be created again."""


def is_requested(job: Job) -> bool:
    """Return whether there is a request that was not answered."""
    answered = job.status.retry.request if job.status.retry is not None else ""
    return job.retry_request not in ("", answered)


def refusal(job: Job, accepted: Finding) -> str:
    """Return why a job that has ended cannot be run again; empty: it can.

    accepted: condition Accepted of the current spec.
    """
    if accepted.status != "True" or not isinstance(job.spec, PPOJobSpec):
        return f"the job cannot be run as it is: {accepted.reason}: {accepted.message}"
    if _true(job.status, Condition.COMPLETE) is None:
        return ""
    checkpoint, trainer = job.status.checkpoint, job.spec.trainer.with_length()
    if checkpoint is None:
        return "the job is complete and has no checkpoint to continue from: create another PPOJob"
    done = max(checkpoint.step, job.status.progress.step if job.status.progress is not None else 0)
    if trainer.total_steps is not None and done >= trainer.total_steps:
        return (
            f"nothing is left to do: {done} of {trainer.total_steps} steps are done. Raise spec.trainer.totalSteps, "
            f"then run `kubectl ppo retry {job.key.name}` again"
        )
    return ""


def rerun(job: Job, accepted: Finding, now: datetime) -> Rerun:
    """Return the changes that let the job run again."""
    status, attempt, checkpoint = job.status, (job.status.attempt or 0) + 1, job.status.checkpoint
    end = _true(status, Condition.COMPLETE) or _true(status, Condition.FAILED)
    assert end is not None, "the job has not ended"
    where = "starts from step 0" if checkpoint is None else f"resumes from the checkpoint of step {checkpoint.step}"
    cause = end.message.partition(f"; {REMEDY}")[0]
    message = f"attempt {attempt} {where}, as requested; the job had ended with {end.type}: {end.reason}: {cause}"
    starting = Finding("False", Reason.RESTARTING, message)
    waiting = Finding("False", Reason.WAITING_FOR_PODS, f"attempt {attempt} has no pods yet")
    findings = {
        Condition.ACCEPTED: accepted,
        Condition.POOLS_READY: waiting,
        Condition.SUBMITTED: starting,
        Condition.PROGRESSING: starting,
        end.type: Finding("False", Reason.RETRIED, message),
    }
    # The other policies write these again; what they say now is about the end.
    others = {
        Condition.ADMITTED: Finding("False", Reason.QUEUED, "the job is being added to its queue again"),
        Condition.STALLED: Finding("False", Reason.TRAINING, "no time limit was exceeded"),
        Condition.SUSPENDED: Finding("False", Reason.RESUMED, message),
    }
    known = {condition.type: condition for condition in status.conditions}
    fetched = known.get(Condition.SOURCES_FETCHED)
    update = {
        "attempt": attempt,
        "submission_id": None,
        "ray_cluster": None,
        "start_time": format_time(now),
        "active_seconds": None,
        "completion_time": None,
        "last_failure": None,
        "stop": None,
        "retries": _fresh(status),
        "retry": RetryStatus(request=job.retry_request, time=format_time(now)),
        "observed_generation": job.generation,
    }
    return Rerun(
        findings | {kind: finding for kind, finding in others.items() if kind in known},
        update,
        EventRecord(Reason.RETRIED, message, is_warning=False, action=Condition.PROGRESSING),
        is_fetch_repeated=fetched is not None and fetched.status != "True",
    )


def refused(job: Job, words: str, now: datetime) -> tuple[RetryStatus, EventRecord]:
    """Return the answer to a request that cannot be followed, and its Event."""
    answer = RetryStatus(request=job.retry_request, refusal=words, time=format_time(now))
    return answer, EventRecord(Reason.RETRY_REFUSED, words, is_warning=True, action=Condition.PROGRESSING)


def of_unfinished(job: Job, now: datetime) -> RetryStatus | None:
    """Return `status.retry` of a job that has not ended: a request has no effect."""
    return refused(job, _STILL_RUNS, now)[0] if is_requested(job) else job.status.retry


def _fresh(status: PPOJobStatus) -> Retries:
    retries = status.retries or Retries()
    return retries.model_copy(update={"counted": 0, "since_progress": 0, "checkpoint_step": None})


def _true(status: PPOJobStatus, kind: str) -> ConditionStatus | None:
    return next((each for each in status.conditions if (each.type, each.status) == (kind, "True")), None)
