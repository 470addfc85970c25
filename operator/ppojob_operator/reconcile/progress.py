"""Policy: what the trainer's reports and Ray's dashboard say. Conditions Progressing, Stalled, Complete, ModelUploaded.

Missing reports end no attempt and are no stall, because the trainer may still be training. If the dashboard does not
respond either, the head is lost (`attempts.py`). A trainer has stalled if its reports arrive and show no progress for
too long. An upload that failed ends no job: the model is in the storage.
"""

from datetime import datetime, timedelta
from urllib.parse import urlsplit

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import MAX_REPORT_INTERVAL_SECONDS, Activity, FailureKind
from ppojob_operator.plan import EventRecord, RayState
from ppojob_operator.reconcile.situation import Failure, Finding, Situation
from ppojob_operator.times import parse_time

_REPORT_TIMEOUT = timedelta(seconds=2 * MAX_REPORT_INTERVAL_SECONDS)
"""Time without a report before Progressing is Unknown; with many jobs a trainer reports only every 30 seconds."""
_FIRST_REPORT_TIMEOUT = timedelta(seconds=180)
"""Time before the first report: the trainer imports Ray and vLLM, and may wait two minutes for job.json."""


def progressing(situation: Situation) -> Finding:
    """Return condition Progressing of an attempt that has not failed."""
    if situation.submitted_at is None:
        if situation.attempt > 0:
            return Finding("False", Reason.RESTARTING, f"attempt {situation.attempt} has not started yet")
        return Finding("False", Reason.STARTING, "the trainer has not started yet")
    ray = situation.observed.ray
    if ray is None or ray.problem:
        problem = ray.problem if ray else "the head pod is not ready"
        return Finding("Unknown", Reason.DASHBOARD_UNREACHABLE, f"Ray's dashboard does not answer: {problem}")
    if message := _missing_reports(situation):
        return Finding("Unknown", Reason.REPORTS_MISSING, message)
    return _reported(situation)


def _reported(situation: Situation) -> Finding:
    """Return the finding from the last report, or of a trainer that has not reported yet."""
    if situation.reported_at is None:
        return Finding("False", Reason.STARTING, "the trainer was started and has not reported yet")
    if situation.status.progress is not None and situation.status.progress.activity == Activity.LOADING:
        return Finding("True", Reason.STARTING, "the trainer loads models and data")
    return Finding("True", Reason.TRAINING, "the trainer reports progress")


def _missing_reports(situation: Situation) -> str:
    """Return a message if the reports of a running trainer are missing; empty: they arrive, or there is still time.

    A new leader waits for the same time again, because reports may have been lost before. A message about the same
    report stays.
    """
    since, ray_job = situation.reported_at or situation.submitted_at, situation.ray_job
    if since is None or ray_job is None or ray_job.state is not RayState.RUNNING:
        return ""
    message, before = _message(situation, since), situation.condition(Condition.PROGRESSING)
    if before is not None and (before.reason, before.message) == (Reason.REPORTS_MISSING, message):
        return message
    limit = _FIRST_REPORT_TIMEOUT if situation.reported_at is None else _REPORT_TIMEOUT
    return message if situation.now - max(since, situation.observed.leading_since or since) > limit else ""


def _message(situation: Situation, since: datetime) -> str:
    progress = situation.status.progress
    if situation.reported_at is not None and progress is not None:
        since = parse_time(progress.last_update_time)
    return (
        f"Ray says that the trainer runs, but no report of it has arrived since {since:%Y-%m-%d %H:%M:%S} UTC; nothing "
        "is restarted, and the next report updates the status. Can its head pod reach "
        f"{urlsplit(situation.observed.surroundings.report_url).netloc}? See network policies, the operator's Service, "
        "and 'progress did not arrive' in the trainer's log"
    )


def stall(situation: Situation) -> Failure | None:
    """Return the failure of an attempt that has stalled and should be restarted, else None."""
    words = _standstill(situation)
    return Failure(FailureKind.USER, Reason.NO_PROGRESS, words) if words and _restarts(situation) else None


def stalled_while_running(situation: Situation) -> Finding:
    """Return condition Stalled of a running attempt."""
    words = _standstill(situation)
    if not words:
        return stalled(None)
    return Finding("True", Reason.NO_PROGRESS, f"{words}; it continues, because spec.runPolicy.restartOnStall is false")


def stall_events(situation: Situation) -> tuple[EventRecord, ...]:
    """Return the Event of an attempt that has just stalled and continues."""
    before, found = situation.condition(Condition.STALLED), stalled_while_running(situation)
    if found.status == "False" or (before is not None and before.status == "True"):
        return ()
    return (EventRecord(found.reason, found.message, is_warning=True, action=Condition.STALLED),)


def _restarts(situation: Situation) -> bool:
    return situation.spec.run_policy.restart_on_stall


def _standstill(situation: Situation) -> str:
    """Return a message if the reports have shown no progress for too long, else an empty text."""
    progress = situation.status.progress
    if progress is None or situation.reported_at is None or progress.last_change_time is None:
        return ""
    limit = situation.spec.run_policy.stall_timeout_seconds
    # The time between two reports, by the clock of the replica that received them; the time since does not count.
    if parse_time(progress.last_update_time) - parse_time(progress.last_change_time) <= timedelta(seconds=limit):
        return ""
    return (
        f"the trainer's reports have shown no change for {limit} s (spec.runPolicy.stallTimeoutSeconds), since step "
        f"{progress.step}, {progress.activity}: see its logs in the storage, or raise the limit if loading or a phase "
        "of a step takes longer"
    )


def stalled(failure: Failure | None) -> Finding:
    """Return condition Stalled after a failure; None: of an attempt that has not failed."""
    if failure is not None and failure.reason == Reason.NO_PROGRESS:
        return Finding("True", Reason.NO_PROGRESS, failure.message)
    return Finding("False", Reason.TRAINING, "no time limit was exceeded")


def complete(situation: Situation) -> Finding | None:
    """Return condition Complete if Ray reports that the trainer succeeded, else None."""
    ray_job = situation.ray_job
    if ray_job is None or ray_job.state is not RayState.SUCCEEDED:
        return None
    return Finding("True", Reason.TRAINER_SUCCEEDED, "the trainer completed; see status.model and the storage")


def complete_without_ray(situation: Situation) -> Finding | None:
    """Return condition Complete of an attempt that is lost after its trainer's last report, else None.

    The trainer sends this report when the last step is saved, exported and uploaded.
    """
    progress = situation.status.progress
    is_current = situation.submitted_at is not None and progress is not None and progress.attempt == situation.attempt
    if not is_current or progress is None or progress.activity != Activity.FINISHED:
        return None
    words = "the trainer reported that it has finished, and was lost before Ray did; see status.model"
    return Finding("True", Reason.TRAINER_SUCCEEDED, words)


def model_uploaded(situation: Situation) -> Finding | None:
    """Return the condition ModelUploaded; None for a job whose exports stay in the storage."""
    target, model = situation.spec.checkpoint.export_to, situation.status.model
    if target is None:
        return None
    if model is not None and model.upload_failure is not None:
        return Finding("False", model.upload_failure.reason, model.upload_failure.message)
    if model is not None and model.address is not None:
        return Finding("True", Reason.UPLOADED, f"the newest export is uploaded: {model.address}")
    ray_job = situation.ray_job
    if ray_job is not None and ray_job.state is RayState.SUCCEEDED:
        words = f"the trainer completed, but no report of an upload to {target} arrived: see the end of its log"
        return Finding("Unknown", Reason.REPORTS_MISSING, words)
    return Finding("False", Reason.NOT_UPLOADED, f"no export is uploaded to {target} yet")
