"""Policy: has the job's queue let it in? A job without a queue has nothing to wait for.

    queued --- Kueue sets spec.suspend of the RayCluster to false ---> admitted --- to true: for others ---> evicted
      ^                                                                                                        |
      `-------- the trainer has put a checkpoint down, or its time is over, and the pods are gone -------------'

Kueue alone writes `spec.suspend`, and the RayCluster stays what it is, so that the job keeps its place in the queue.
`stopping.py` carries an eviction out; no deadline runs in the queue.
"""

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.plan import Workload
from ppojob_operator.reconcile.situation import Finding, Situation

_MAX_WORDS = 1500


def is_queued(situation: Situation) -> bool:
    """Return whether the job waits in its queue, without a trainer."""
    if situation.spec.run_policy.queue_name is None or situation.submitted_at is not None:
        return False
    return situation.cluster is None or situation.cluster.is_suspended


def is_evicted(situation: Situation) -> bool:
    """Return whether the queue takes the GPUs away from a trainer.

    It still does where it has let the RayCluster in again before it was seen that the trainer is gone.
    """
    if situation.spec.run_policy.queue_name is None or situation.submitted_at is None or situation.cluster is None:
        return False
    stop = situation.open_stop
    return situation.cluster.is_suspended or (stop is not None and stop.reason == Reason.PREEMPTED)


def has_lost_all(situation: Situation) -> bool:
    """Return whether the pods of an attempt that is evicted are gone."""
    is_suspended = situation.cluster is not None and situation.cluster.is_suspended
    own = (pod for pod in situation.observed.pods if pod.cluster == situation.cluster_name)
    # In a RayCluster that was let in again, the pods that stay are those of the next attempt.
    return not any(pod.is_deleting or is_suspended for pod in own)


def judge(situation: Situation) -> Finding | None:
    """Return the condition Admitted; None: the job has no queue."""
    queue, cluster = situation.spec.run_policy.queue_name, situation.cluster
    if queue is None:
        return None
    workload = _workload(situation)
    if is_evicted(situation):
        words = f": {workload.eviction[:_MAX_WORDS]}" if workload and workload.eviction else ""
        return Finding("False", Reason.PREEMPTED, f"the queue {queue} takes the GPUs away from the job{words}")
    if cluster is None:
        return Finding("False", Reason.QUEUED, f"the job is on its way into the queue {queue}")
    if cluster.is_suspended:
        return Finding("False", Reason.QUEUED, f"the job waits in the queue {queue}{_waits_for(workload)}")
    if workload is None and not _was_admitted(situation):
        words = (
            "Kueue does not manage the RayCluster, so the job runs without a queue: "
            "turn on its integration ray.io/raycluster"
        )
        return Finding("Unknown", Reason.NOT_QUEUED, words)
    return Finding("True", Reason.ADMITTED, f"the queue {queue} has let the job in")


def knows_why(situation: Situation) -> bool:
    """Return whether Kueue has said what a queued job waits for."""
    workload = _workload(situation)
    return workload is not None and bool(workload.waits_for)


def _workload(situation: Situation) -> Workload | None:
    owner = situation.cluster.uid if situation.cluster else ""
    return next((each for each in situation.observed.workloads or () if each.owner == owner), None)


def _waits_for(workload: Workload | None) -> str:
    if workload is None or not workload.waits_for:
        return ""
    before = f"; it was let in before: {workload.eviction[:_MAX_WORDS]}" if workload.eviction else ""
    return f": {workload.waits_for[:_MAX_WORDS]}{before}"


def _was_admitted(situation: Situation) -> bool:
    admitted = situation.condition(Condition.ADMITTED)
    return admitted is not None and admitted.status == "True"
