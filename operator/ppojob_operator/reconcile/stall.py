"""Policy: does the trainer get anywhere? It has stalled where its reports arrive and say the same for too long.

Silence is no stall: whoever cannot be heard may train on (`progressing.py`).
"""

from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import EventRecord
from ppojob_operator.reconcile.reading import parse_time
from ppojob_operator.reconcile.situation import Failure, Finding, Situation


def judge(situation: Situation) -> Failure | None:
    """Return the failure of an attempt whose trainer has stood still for too long and is to be replaced, else None."""
    words = _standstill(situation)
    return Failure(FailureKind.USER, Reason.NO_PROGRESS, words) if words and _restarts(situation) else None


def overdue(situation: Situation) -> Finding:
    """Return the condition Stalled of an attempt that goes on."""
    words = _standstill(situation)
    if not words:
        return stalled(None)
    return Finding("True", Reason.NO_PROGRESS, f"{words}; it goes on, as spec.runPolicy.restartOnStall is false")


def events(situation: Situation) -> tuple[EventRecord, ...]:
    """Return the Event of an attempt that has just stalled and goes on."""
    before, found = situation.condition(Condition.STALLED), overdue(situation)
    if found.status == "False" or (before is not None and before.status == "True"):
        return ()
    return (EventRecord(found.reason, found.message, is_warning=True, action=Condition.STALLED),)


def _restarts(situation: Situation) -> bool:
    return situation.spec.run_policy.restart_on_stall


def _standstill(situation: Situation) -> str:
    """Return in words for how long the reports that arrived have said the same; empty: not for too long."""
    progress = situation.status.progress
    if progress is None or situation.reported_at is None or progress.last_change_time is None:
        return ""
    limit = situation.spec.run_policy.stall_timeout_seconds
    # Between two reports, both by the clock of who took them, and never up to now.
    if parse_time(progress.last_update_time) - parse_time(progress.last_change_time) <= timedelta(seconds=limit):
        return ""
    return (
        f"for {limit} s (spec.runPolicy.stallTimeoutSeconds) the trainer has reported nothing but step "
        f"{progress.step}, {progress.activity}: see its logs in the storage, or raise the limit if a phase of a step, "
        "or loading, really takes that long"
    )


def stalled(failure: Failure | None) -> Finding:
    """Return the condition Stalled."""
    if failure is not None and failure.reason == Reason.NO_PROGRESS:
        return Finding("True", Reason.NO_PROGRESS, failure.message)
    return Finding("False", Reason.TRAINING, "no limit of time was passed")
