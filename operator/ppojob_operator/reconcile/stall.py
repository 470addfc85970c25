"""Policy: condition Stalled. A trainer has stalled if its reports arrive and show no progress for too long.

Missing reports are no stall, because the trainer may still be training (`progressing.py`).
"""

from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import EventRecord
from ppojob_operator.reconcile.reading import parse_time
from ppojob_operator.reconcile.situation import Failure, Finding, Situation


def judge(situation: Situation) -> Failure | None:
    """Return the failure of an attempt that has stalled and should be restarted, else None."""
    words = _standstill(situation)
    return Failure(FailureKind.USER, Reason.NO_PROGRESS, words) if words and _restarts(situation) else None


def overdue(situation: Situation) -> Finding:
    """Return condition Stalled of a running attempt."""
    words = _standstill(situation)
    if not words:
        return stalled(None)
    return Finding("True", Reason.NO_PROGRESS, f"{words}; it continues, because spec.runPolicy.restartOnStall is false")


def events(situation: Situation) -> tuple[EventRecord, ...]:
    """Return the Event of an attempt that has just stalled and continues."""
    before, found = situation.condition(Condition.STALLED), overdue(situation)
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
        f"for {limit} s (spec.runPolicy.stallTimeoutSeconds) the trainer has reported nothing but step "
        f"{progress.step}, {progress.activity}: see its logs in the storage, or raise the limit if a phase of a step, "
        "or loading, really takes that long"
    )


def stalled(failure: Failure | None) -> Finding:
    """Return condition Stalled after a failure; None: of an attempt that has not failed."""
    if failure is not None and failure.reason == Reason.NO_PROGRESS:
        return Finding("True", Reason.NO_PROGRESS, failure.message)
    return Finding("False", Reason.TRAINING, "no time limit was exceeded")
