"""Policy: condition Progressing, from the trainer's reports and Ray's dashboard.

Missing reports end no attempt, because the trainer may still be training. If the dashboard does not respond either, the
head is lost (`attempts.py`). If reports arrive without progress, the trainer has stalled (`stall.py`).
"""

from datetime import datetime, timedelta
from urllib.parse import urlsplit

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import Activity
from ppojob_operator.plan import RayState
from ppojob_operator.reconcile.reading import parse_time
from ppojob_operator.reconcile.situation import Finding, Situation

_REPORT_TIMEOUT = timedelta(seconds=60)
"""Time without a report before Progressing is Unknown; the trainer reports every ten seconds."""
_FIRST_REPORT_TIMEOUT = timedelta(seconds=180)
"""Time before the first report: the trainer imports Ray and vLLM, and may wait two minutes for job.json."""


def judge(situation: Situation) -> Finding:
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
