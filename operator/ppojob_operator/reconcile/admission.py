"""Policy: has Kueue admitted the job? Sets condition Admitted of jobs with a queue.

    queued --- Kueue sets spec.suspend of the RayCluster to false ---> admitted --- Kueue sets it to true ---> evicted
      ^                                                                                                          |
      `---- the trainer has saved a checkpoint or its grace period is over, and the pods are deleted ------------'

Only Kueue writes `spec.suspend`. The RayCluster is kept, so the job keeps its place in the queue. `stopping.py` handles
an eviction. No deadline runs while the job is queued.
"""

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.plan import Workload
from ppojob_operator.reconcile.situation import Finding, Situation

_MAX_WORDS = 1500


def is_queued(situation: Situation) -> bool:
    """Return whether the job is waiting in its queue, without a trainer."""
    if situation.spec.run_policy.queue_name is None or situation.submitted_at is not None:
        return False
    return situation.cluster is None or situation.cluster.is_suspended


def is_evicted(situation: Situation) -> bool:
    """Return whether the queue evicts an attempt with a trainer.

    This remains true if Kueue admits the RayCluster again before the operator has seen the end of the trainer.
    """
    if situation.spec.run_policy.queue_name is None or situation.submitted_at is None or situation.cluster is None:
        return False
    stop = situation.open_stop
    return situation.cluster.is_suspended or (stop is not None and stop.reason == Reason.PREEMPTED)


def has_lost_all(situation: Situation) -> bool:
    """Return whether the pods of an evicted attempt are deleted."""
    is_suspended = situation.cluster is not None and situation.cluster.is_suspended
    own = (pod for pod in situation.observed.pods if pod.cluster == situation.cluster_name)
    # In a RayCluster that was admitted again, the remaining pods are those of the next attempt.
    return not any(pod.is_deleting or is_suspended for pod in own)


def judge(situation: Situation) -> Finding | None:
    """Return condition Admitted; None: the job has no queue."""
    queue, cluster = situation.spec.run_policy.queue_name, situation.cluster
    if queue is None:
        return None
    workload = _workload(situation)
    if is_evicted(situation):
        words = f": {workload.eviction[:_MAX_WORDS]}" if workload and workload.eviction else ""
        return Finding("False", Reason.PREEMPTED, f"the queue {queue} has evicted the job{words}")
    if cluster is None:
        return Finding("False", Reason.QUEUED, f"the job is being added to the queue {queue}")
    if cluster.is_suspended:
        return Finding("False", Reason.QUEUED, f"the job waits in the queue {queue}{_waits_for(workload)}")
    if workload is None and not _was_admitted(situation):
        words = (
            "Kueue does not manage the RayCluster, so the job runs without a queue: "
            "turn on its integration ray.io/raycluster"
        )
        return Finding("Unknown", Reason.NOT_QUEUED, words)
    return Finding("True", Reason.ADMITTED, f"the queue {queue} has admitted the job")


def knows_why(situation: Situation) -> bool:
    """Return whether Kueue has a message about what a queued job waits for."""
    workload = _workload(situation)
    return workload is not None and bool(workload.waits_for)


def _workload(situation: Situation) -> Workload | None:
    owner = situation.cluster.uid if situation.cluster else ""
    return next((each for each in situation.observed.workloads or () if each.owner == owner), None)


def _waits_for(workload: Workload | None) -> str:
    if workload is None or not workload.waits_for:
        return ""
    before = f"; it was admitted before: {workload.eviction[:_MAX_WORDS]}" if workload.eviction else ""
    return f": {workload.waits_for[:_MAX_WORDS]}{before}"


def _was_admitted(situation: Situation) -> bool:
    admitted = situation.condition(Condition.ADMITTED)
    return admitted is not None and admitted.status == "True"
