"""Policy: what follows from a failed attempt: another one, or the end of the job."""

from dataclasses import dataclass

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.status import Retries
from ppojob_operator.reconcile.situation import Failure, Situation


@dataclass(frozen=True)
class Verdict:
    """What follows from a failure."""

    is_final: bool
    """The job has failed."""
    reason: str
    message: str
    retries: Retries
    keeps_cluster: bool = False
    """The next attempt begins on the pods that are there."""


def judge(situation: Situation, failure: Failure, *, is_cluster_whole: bool) -> Verdict:
    """Return what follows from the failure of the current attempt.

    is_cluster_whole: its pods are ready, or those that are not are being replaced.
    """
    retries, policy = situation.status.retries or Retries(), situation.spec.run_policy
    if failure.kind is FailureKind.PERMANENT:
        return Verdict(True, failure.reason, failure.message, retries)
    is_user = failure.kind is FailureKind.USER
    used, limit = (
        (retries.user, policy.backoff_limit)
        if is_user
        else (retries.infrastructure, policy.infrastructure_backoff_limit)
    )
    if used >= limit:
        field = "backoffLimit" if is_user else "infrastructureBackoffLimit"
        message = (
            f"attempt {situation.attempt} failed ({failure.headline}) "
            f"and spec.runPolicy.{field} allows no more than {limit} retries"
        )
        return Verdict(True, Reason.BACKOFF_LIMIT_EXCEEDED, message, retries)
    counted = Retries(
        user=retries.user + is_user,
        infrastructure=retries.infrastructure + (not is_user),
        total=retries.total + 1,
    )
    message = f"attempt {situation.attempt} failed ({failure.headline})"
    keeps_cluster = is_cluster_whole and not failure.is_cluster_suspect
    return Verdict(False, Reason.RESTARTING, message, counted, keeps_cluster)
