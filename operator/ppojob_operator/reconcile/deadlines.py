"""Policy: the startup deadline, the active deadline, and when a finished job is deleted (`ttlSecondsAfterFinished`).

After the active deadline, the job fails. After the startup deadline, and if a registry refuses an image (`images.py`),
it fails only if it has never run. A job that has run keeps waiting, because failing would lose its steps, and capacity
usually returns. If the attempt waits for pools that autoBalance has enlarged, their sizes are reverted (event
EnlargementFailed).
"""

from datetime import datetime, timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Job
from ppojob_operator.reconcile import images
from ppojob_operator.reconcile.objects import Step
from ppojob_operator.reconcile.pods import CAPACITY_REASONS, PoolsFinding
from ppojob_operator.reconcile.situation import Failure, Finding, Situation
from ppojob_operator.times import parse_time


def exceeded(situation: Situation, pools: Finding, step: Step) -> Failure | None:
    """Return the failure of a job that is past one of its deadlines, else None."""
    if failure := _active(situation):
        return failure
    if situation.has_run or situation.submitted_at is not None:
        return None
    if words := images.refusal(situation):
        return Failure(FailureKind.PERMANENT, Reason.IMAGE_PULL_FAILED, words)
    if not _is_late(situation, pools, step):
        return None
    limit = situation.spec.run_policy.startup_deadline_seconds
    message = (
        f"the trainer could not be started within {limit} s (spec.runPolicy.startupDeadlineSeconds): "
        f"{_cause(pools, step)}"
    )
    return Failure(FailureKind.PERMANENT, Reason.STARTUP_DEADLINE_EXCEEDED, message)


def delay(situation: Situation, pools: Finding, step: Step) -> Finding | None:
    """Return condition Progressing of a job that has run and whose next attempt is late; None: it is not late."""
    if not situation.has_run or not _is_late(situation, pools, step):
        return None
    checkpoint = situation.status.checkpoint
    where = f"its checkpoint of step {checkpoint.step}" if checkpoint is not None else "its last checkpoint"
    message = (
        f"attempt {situation.attempt} has waited to start since {_begin(situation, pools):%Y-%m-%d %H:%M:%S} UTC; "
        f"it keeps waiting, nothing is lost, and it will resume from {where}: {_cause(pools, step)}"
    )
    return Finding("False", Reason.STARTUP_DELAYED, message)


def has_partial_pods_too_long(situation: Situation, found: PoolsFinding) -> bool:
    """Return whether a job that has run keeps GPUs, for which other jobs may wait, and not all of its pods start."""
    policy = situation.spec.run_policy
    if policy.queue_name is not None or not situation.has_run or found.is_ready:
        return False
    # Also pods on a node that are not ready. A head alone has no GPUs.
    workers = (pod for pod in situation.pods if pod.pool is not None)
    has_pods = any(pod.trouble is None or pod.trouble.reason not in CAPACITY_REASONS for pod in workers)
    limit = timedelta(seconds=policy.partial_pods_timeout_seconds)
    return has_pods and situation.now >= _begin(situation, found.finding) + limit


def next_deadline(situation: Situation, pools: Finding) -> datetime | None:
    """Return the next time at which a deadline passes or an attempt is due."""
    active, moments = situation.spec.run_policy.active_deadline_seconds, []
    if active is not None:
        moments.append(situation.now + timedelta(seconds=active) - situation.active_time)
    if situation.submitted_at is None:
        moments.append(situation.due)
        if (refused := images.next_refusal(situation)) is not None:
            moments.append(refused)
        moments.append(_startup_deadline(situation, pools))
        limit = timedelta(seconds=situation.spec.run_policy.partial_pods_timeout_seconds)
        moments.append(_begin(situation, pools) + limit)
    return min((moment for moment in moments if moment > situation.now), default=None)


def _active(situation: Situation) -> Failure | None:
    limit = situation.spec.run_policy.active_deadline_seconds
    if limit is None or situation.active_time < timedelta(seconds=limit):
        return None
    message = f"the job was active for {limit} s (spec.runPolicy.activeDeadlineSeconds) and had not ended"
    return Failure(FailureKind.PERMANENT, Reason.ACTIVE_DEADLINE_EXCEEDED, message)


def _is_late(situation: Situation, pools: Finding, step: Step) -> bool:
    """Return whether the attempt is past its startup deadline, and this reconcile does not advance it either."""
    is_made_now = situation.cluster is None and not situation.observed.last_error
    if situation.submitted_at is not None or step.submission is not None or is_made_now:
        return False
    return situation.now >= _startup_deadline(situation, pools)


def _startup_deadline(situation: Situation, pools: Finding) -> datetime:
    return _begin(situation, pools) + timedelta(seconds=situation.spec.run_policy.startup_deadline_seconds)


def _begin(situation: Situation, pools: Finding) -> datetime:
    """Return the start of the attempt's startup deadline. Each attempt has the whole time, as its nodes may be new.

    If the next action is the operator's (no RayCluster exists, or all pods are ready), time without an operator is
    not counted.
    """
    moments, cluster, leading_since = [situation.due], situation.cluster, situation.observed.leading_since
    if pools.status == "True":
        moments.append(situation.now - situation.age_of(Condition.POOLS_READY, "True"))
    if (pools.status == "True" or cluster is None) and leading_since is not None:
        moments.append(leading_since)
    if cluster is not None and cluster.created is not None:
        moments.append(cluster.created)
    return max(moments)


def _cause(pools: Finding, step: Step) -> str:
    cause = step.finding if pools.status == "True" else pools
    return f"{cause.reason}: {cause.message}"


def expiry(job: Job) -> datetime | None:
    """Return when the finished job is deleted; None: never."""
    seconds, ended = job.ttl_seconds_after_finished, job.status.completion_time
    return None if seconds is None or ended is None else parse_time(ended) + timedelta(seconds=seconds)
