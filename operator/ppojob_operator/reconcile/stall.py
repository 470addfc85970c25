"""Policy: does the trainer get anywhere? It reports at least every ten seconds; silence means that it hangs."""

from datetime import timedelta

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import Activity, FailureKind
from ppojob_operator.reconcile.situation import Failure, Finding, Situation


def judge(situation: Situation) -> Failure | None:
    """Return the failure of an attempt whose trainer has been silent for too long, else None."""
    since = situation.reported_at or situation.submitted_at
    limit = situation.spec.run_policy.stall_timeout_seconds
    if since is None or situation.now - since <= timedelta(seconds=limit):
        return None
    what = "has not reported once" if situation.reported_at is None else "has reported no progress"
    message = (
        f"the trainer {what} for {limit} s (spec.runPolicy.stallTimeoutSeconds): see its logs in the storage, "
        "or raise the limit if a phase of the step really takes that long"
    )
    return Failure(FailureKind.USER, Reason.NO_PROGRESS, message)


def progressing(situation: Situation) -> Finding:
    """Return the condition Progressing of an attempt that has not failed."""
    if situation.submitted_at is None:
        if situation.attempt > 0:
            return Finding("False", Reason.RESTARTING, f"attempt {situation.attempt} has not begun yet")
        return Finding("False", Reason.STARTING, "the trainer has not begun yet")
    ray = situation.observed.ray
    if ray is None or ray.problem:
        problem = ray.problem if ray else "the head pod is not ready"
        return Finding("Unknown", Reason.DASHBOARD_UNREACHABLE, f"Ray's dashboard does not answer: {problem}")
    if situation.reported_at is None:
        return Finding("False", Reason.STARTING, "the trainer was started and has not reported yet")
    if situation.status.progress is not None and situation.status.progress.activity == Activity.LOADING:
        return Finding("True", Reason.STARTING, "the trainer loads models and data")
    return Finding("True", Reason.TRAINING, "the trainer reports progress")


def stalled(failure: Failure | None) -> Finding:
    """Return the condition Stalled."""
    if failure is not None and failure.reason == Reason.NO_PROGRESS:
        return Finding("True", Reason.NO_PROGRESS, failure.message)
    return Finding("False", Reason.TRAINING, "no limit of time was passed")
