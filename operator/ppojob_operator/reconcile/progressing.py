"""Policy: is the trainer heard of? Its reports and Ray's dashboard make the condition Progressing, and nothing else.

A trainer that cannot be heard may train on: silence ends no attempt. That of trainer and dashboard together is a lost
head (`attempts.py`), and reports that say the same for too long are a stall (`stall.py`).
"""

from datetime import datetime, timedelta
from urllib.parse import urlsplit

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import Activity
from ppojob_operator.plan import RayState
from ppojob_operator.reconcile.reading import parse_time
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

    Whoever has just taken the lead gives it the same time again: nobody may have listened before. What was said of the
    same report already stays so.
    """
    since, ray_job = situation.reported_at or situation.submitted_at, situation.ray_job
    if since is None or ray_job is None or ray_job.state is not RayState.RUNNING:
        return ""
    words, before = _words(situation, since), situation.condition(Condition.PROGRESSING)
    if before is not None and (before.reason, before.message) == (Reason.REPORTS_MISSING, words):
        return words
    patience = _FIRST_SILENCE if situation.reported_at is None else _SILENCE
    return words if situation.now - max(since, situation.observed.leading_since or since) > patience else ""


def _words(situation: Situation, since: datetime) -> str:
    progress = situation.status.progress
    if situation.reported_at is not None and progress is not None:
        since = parse_time(progress.last_update_time)
    return (
        f"Ray says that the trainer runs, but no report of it has arrived since {since:%Y-%m-%d %H:%M:%S} UTC; nothing "
        "is restarted, and the next report catches up. Can its head pod reach "
        f"{urlsplit(situation.observed.surroundings.report_url).netloc}? See network policies, the operator's Service, "
        "and in the trainer's log: progress did not arrive"
    )
