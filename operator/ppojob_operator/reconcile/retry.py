"""Policy: after a failed attempt, retry or fail the job?

An attempt that runs out of memory is retried once, because something else may have used the memory. A second one in a
row with the same layout ends the job: a third would hold the GPUs for nothing.
"""

from dataclasses import dataclass

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.layout import digest_of, layout_of
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.status import Retries
from ppojob_operator.reconcile.situation import Failure, Situation

_DELETIONS = 5
"""Number of manual deletions of the RayCluster that count against no limit. More are treated as a failure of the
cluster."""


@dataclass(frozen=True)
class Verdict:
    """The consequence of a failure."""

    is_final: bool
    """The job has failed."""
    reason: str
    message: str
    retries: Retries
    keeps_cluster: bool = False
    """The next attempt reuses the pods."""


def judge(situation: Situation, failure: Failure, *, is_cluster_whole: bool) -> Verdict:
    """Return the consequence of the current attempt's failure.

    is_cluster_whole: its pods are ready, or those that are not are being replaced.
    """
    retries, policy = situation.status.retries or Retries(), situation.spec.run_policy
    if failure.kind is FailureKind.PERMANENT:
        return Verdict(True, failure.reason, failure.message, retries)
    if failure.reason == Reason.OUT_OF_MEMORY and _ran_out_of_memory_before(situation):
        message = (
            f"attempts {situation.attempt - 1} and {situation.attempt} ran out of memory with the same settings "
            f"({failure.headline}). {_how_to_continue(situation)}"
        )
        return Verdict(True, Reason.OUT_OF_MEMORY, message, retries)
    num_deleted = retries.deleted or 0
    if failure.reason == Reason.CLUSTER_DELETED and num_deleted < _DELETIONS:
        counted = retries.model_copy(update={"deleted": num_deleted + 1, "total": retries.total + 1})
        message = f"attempt {situation.attempt} ended ({failure.headline}); the next one does not count against a limit"
        return Verdict(False, Reason.RESTARTING, message, counted)
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
        deleted=retries.deleted,
        total=retries.total + 1,
    )
    message = f"attempt {situation.attempt} failed ({failure.headline})"
    keeps_cluster = is_cluster_whole and not failure.is_cluster_suspect
    return Verdict(False, Reason.RESTARTING, message, counted, keeps_cluster)


def _ran_out_of_memory_before(situation: Situation) -> bool:
    """Return whether the attempt before the current one ran out of memory, with the layout that is in force now."""
    last = situation.status.last_failure
    return (
        last is not None
        and last.reason == Reason.OUT_OF_MEMORY
        and last.attempt == situation.attempt - 1
        and last.layout_digest == digest_of(layout_of(situation.spec))
    )


def _how_to_continue(situation: Situation) -> str:
    checkpoint = situation.status.checkpoint
    if checkpoint is None:
        return "Delete the job, correct the settings, and create it again"
    return (
        "Delete the job, correct the settings, and create it again; checkpoint.resumeFrom: "
        f"{checkpoint.path} continues after step {checkpoint.step}"
    )
