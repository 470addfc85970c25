"""Policy: the time that a job may take to start, and to run. Beyond either it fails for good."""

from datetime import datetime, timedelta

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.reconcile.situation import Failure, Finding, Situation


def judge(situation: Situation, pools: Finding, submitted: Finding) -> Failure | None:
    """Return the failure of a job that is past one of its deadlines, else None."""
    return _active(situation) or _startup(situation, pools, submitted)


def next_deadline(situation: Situation) -> datetime | None:
    """Return the next moment at which time alone may change the verdict."""
    active, moments = situation.spec.run_policy.active_deadline_seconds, []
    if active is not None:
        moments.append(situation.start_time + timedelta(seconds=active))
    if situation.submitted_at is None:
        moments.append(situation.due)
        moments.append(_startup_deadline(situation))
    return min((moment for moment in moments if moment > situation.now), default=None)


def _active(situation: Situation) -> Failure | None:
    limit = situation.spec.run_policy.active_deadline_seconds
    if limit is None or situation.now < situation.start_time + timedelta(seconds=limit):
        return None
    message = f"the job was active for {limit} s (spec.runPolicy.activeDeadlineSeconds) and had not ended"
    return Failure(FailureKind.PERMANENT, Reason.ACTIVE_DEADLINE_EXCEEDED, message)


def _startup(situation: Situation, pools: Finding, submitted: Finding) -> Failure | None:
    if situation.submitted_at is not None or situation.now < _startup_deadline(situation):
        return None
    limit = situation.spec.run_policy.startup_deadline_seconds
    cause = submitted if pools.status == "True" else pools
    message = (
        f"the trainer could not be started within {limit} s (spec.runPolicy.startupDeadlineSeconds): "
        f"{cause.reason}: {cause.message}"
    )
    return Failure(FailureKind.PERMANENT, Reason.STARTUP_DEADLINE_EXCEEDED, message)


def _startup_deadline(situation: Situation) -> datetime:
    """Each attempt has the whole time: a later one may need new pods on other nodes."""
    return situation.due + timedelta(seconds=situation.spec.run_policy.startup_deadline_seconds)
