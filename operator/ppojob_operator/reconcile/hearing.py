"""Policy: is the trainer heard of? Its reports and Ray's dashboard make the condition Progressing, and nothing else.

A trainer that cannot be heard may train on: silence ends no attempt. That of trainer and dashboard together is a lost
head (`attempts.py`), and reports that say the same for too long are a stall (`stall.py`).
"""

from datetime import timedelta
from urllib.parse import urlsplit

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import Activity
from ppojob_operator.plan import RayState
from ppojob_operator.reconcile.situation import Finding, Situation

_SILENCE = timedelta(seconds=60)
"""How long a trainer that reports every ten seconds may not be heard of."""
_FIRST_SILENCE = timedelta(seconds=180)
"""How long before its first report: it imports Ray and vLLM, and may wait two minutes for its file."""


def judge(situation: Situation) -> Finding:
    """Return the condition Progressing of an attempt that has not failed."""
    if situation.submitted_at is None:
        if situation.attempt > 0:
            return Finding("False", Reason.RESTARTING, f"attempt {situation.attempt} has not begun yet")
        return Finding("False", Reason.STARTING, "the trainer has not begun yet")
    ray = situation.observed.ray
    if ray is None or ray.problem:
        problem = ray.problem if ray else "the head pod is not ready"
        return Finding("Unknown", Reason.DASHBOARD_UNREACHABLE, f"Ray's dashboard does not answer: {problem}")
    if words := _silence(situation):
        return Finding("Unknown", Reason.REPORTS_MISSING, words)
    return _reported(situation)


def _reported(situation: Situation) -> Finding:
    """Return what the last report says, or that there may soon be a first one."""
    if situation.reported_at is None:
        return Finding("False", Reason.STARTING, "the trainer was started and has not reported yet")
    if situation.status.progress is not None and situation.status.progress.activity == Activity.LOADING:
        return Finding("True", Reason.STARTING, "the trainer loads models and data")
    return Finding("True", Reason.TRAINING, "the trainer reports progress")


def _silence(situation: Situation) -> str:
    """Return in words since when a trainer that Ray says to run is not heard of; empty: it is, or may soon be.

    Whoever has just taken the lead gives it the same time again: nobody may have listened before. What was missing
    already stays so until a report is there.
    """
    since, ray_job = situation.reported_at or situation.submitted_at, situation.ray_job
    if since is None or ray_job is None or ray_job.state is not RayState.RUNNING:
        return ""
    before, heard = situation.condition(Condition.PROGRESSING), since
    if before is None or before.reason != Reason.REPORTS_MISSING:
        heard = max(since, situation.observed.leading_since or since)
    if situation.now - heard <= (_FIRST_SILENCE if situation.reported_at is None else _SILENCE):
        return ""
    return (
        f"Ray says that the trainer runs, but no report of it has arrived since {since:%Y-%m-%d %H:%M:%S} UTC; nothing "
        f"is restarted, and the next report catches up. Can its head pod reach {_endpoint(situation)}? See network "
        "policies, the operator's Service, and in the trainer's log: progress did not arrive"
    )


def _endpoint(situation: Situation) -> str:
    return urlsplit(situation.observed.surroundings.report_url).netloc
