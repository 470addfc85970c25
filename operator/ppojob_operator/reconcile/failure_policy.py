"""Policy: what follows a failed attempt? `runPolicy.failurePolicy`, `runPolicy.backoffLimit` and `status.retries`.

    failure --- the first rule that matches, else the default ---> Retry   counted against backoffLimit
                                                              |--> Ignore  retried, not counted
                                                              `--> Fail    the job has failed

The words and their meaning are those of Job's podFailurePolicy and JobSet's failurePolicy. By default, disruptions are
ignored and permanent failures fail the job. An attempt that runs out of memory is retried once, because something else
may have used the memory. A second one in a row with the same layout fails the job: a third would hold the GPUs for
nothing.

Failures are counted since the last progress: a checkpoint that is newer than the newest one at the first of these
failures. The pause before the next attempt grows with all failures since then, ignored ones included.
"""

from dataclasses import dataclass

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.layout import digest_of, layout_of
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.runtime import FailedRole, FailureAction, FailureRule
from ppojob_api.v1alpha1.status import Retries
from ppojob_operator.reconcile.situation import Failure, Situation

REMEDY = "correct the cause, then"
"""Beginning of the sentence with which the message of a job that has failed ends."""

DISRUPTIONS = (Reason.PREEMPTED, Reason.NODE_LOST, Reason.CLUSTER_DELETED)
"""Reasons of attempts that ended because somebody, or the cluster, took their pods away."""


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


def verdict(situation: Situation, failure: Failure, *, is_cluster_whole: bool) -> Verdict:
    """Return the consequence of the current attempt's failure.

    is_cluster_whole: its pods are ready, or those that are not are being replaced.
    """
    retries, limit = counted_retries(situation), situation.spec.run_policy.backoff_limit
    found = _matching_rule(situation, failure)
    number, action = (found[0], found[1].action) if found else (None, _default_action(failure))
    where = "" if number is None else f"spec.runPolicy.failurePolicy.rules[{number}]"
    failed = f"attempt {situation.attempt} failed ({failure.headline})"
    if action is FailureAction.FAIL:
        if number is None:
            return Verdict(True, failure.reason, failure.message, retries)
        message = f"{failed} and {where} has the action Fail; {how_to_retry(situation)}"
        return Verdict(True, Reason.FAILURE_POLICY, message, retries)
    if number is None and failure.reason == Reason.OUT_OF_MEMORY and _ran_out_of_memory_before(situation):
        message = (
            f"attempts {situation.attempt - 1} and {situation.attempt} ran out of memory with the same settings "
            f"({failure.headline}); {how_to_retry(situation)}"
        )
        return Verdict(True, Reason.OUT_OF_MEMORY, message, retries)
    is_counted = action is FailureAction.RETRY
    if is_counted and retries.counted >= limit:
        message = (
            f"{failed} and spec.runPolicy.backoffLimit allows no more than {limit} retries without a newer "
            f"checkpoint; {how_to_retry(situation)}"
        )
        return Verdict(True, Reason.BACKOFF_LIMIT_EXCEEDED, message, retries)
    after = _after(situation, retries, failure, is_counted=is_counted)
    if is_counted:
        message = f"{failed}; it is counted ({after.counted} of {limit} since the last progress)"
    else:
        message = f"{failed}; it is not counted{f', because of {where}' if where else ''}"
    keeps_cluster = is_cluster_whole and not failure.is_cluster_suspect
    return Verdict(False, Reason.RESTARTING, message, after, keeps_cluster)


def counted_retries(situation: Situation) -> Retries:
    """Return `status.retries`; after progress, nothing is counted."""
    retries = situation.status.retries or Retries()
    if not has_progressed(situation):
        return retries
    return retries.model_copy(update={"counted": 0, "since_progress": 0, "checkpoint_step": None})


def has_progressed(situation: Situation) -> bool:
    """Return whether there is a newer checkpoint than at the first failure that `status.retries` counts."""
    retries = situation.status.retries
    before = retries.checkpoint_step if retries is not None else None
    return before is not None and _checkpoint_step(situation) > before


def how_to_retry(situation: Situation) -> str:
    """Return the remedy of a job that has failed: run it again after the cause is corrected."""
    checkpoint = situation.status.checkpoint
    where = "" if checkpoint is None else f" from its checkpoint of step {checkpoint.step}"
    return f"{REMEDY} `kubectl ppo retry {situation.job.key.name}` runs the job again{where}"


def _matching_rule(situation: Situation, failure: Failure) -> tuple[int, FailureRule] | None:
    rules = enumerate(situation.spec.run_policy.failure_policy.rules)
    is_of_worker = failure.role in [worker.name for worker in situation.spec.workers]
    role = FailedRole.WORKERS if is_of_worker else failure.role
    return next(((number, rule) for number, rule in rules if _matches(rule, failure, role)), None)


def _matches(rule: FailureRule, failure: Failure, role: str | None) -> bool:
    has_reason = rule.reasons is None or failure.reason in rule.reasons
    has_role = rule.roles is None or role in rule.roles
    return has_reason and has_role and (rule.exit_codes is None or failure.exit_code in rule.exit_codes)


def _default_action(failure: Failure) -> FailureAction:
    if failure.kind is FailureKind.PERMANENT:
        return FailureAction.FAIL
    return FailureAction.IGNORE if failure.reason in DISRUPTIONS else FailureAction.RETRY


def _after(situation: Situation, retries: Retries, failure: Failure, *, is_counted: bool) -> Retries:
    """Return the retries with the one that follows this failure."""
    is_infrastructure = failure.kind is FailureKind.INFRASTRUCTURE
    step = _checkpoint_step(situation) if retries.checkpoint_step is None else retries.checkpoint_step
    return Retries(
        user=retries.user + (is_counted and not is_infrastructure),
        infrastructure=retries.infrastructure + (is_counted and is_infrastructure),
        ignored=retries.ignored + (not is_counted),
        total=retries.total + 1,
        counted=retries.counted + is_counted,
        since_progress=retries.since_progress + 1,
        checkpoint_step=step,
    )


def _checkpoint_step(situation: Situation) -> int:
    checkpoint = situation.status.checkpoint
    return 0 if checkpoint is None else checkpoint.step


def _ran_out_of_memory_before(situation: Situation) -> bool:
    """Return whether the attempt before the current one ran out of memory, with the layout that is in force now."""
    last = situation.status.last_failure
    return (
        last is not None
        and last.reason == Reason.OUT_OF_MEMORY
        and last.attempt == situation.attempt - 1
        and last.layout_digest == digest_of(layout_of(situation.spec))
    )
