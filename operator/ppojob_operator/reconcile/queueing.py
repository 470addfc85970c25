"""Policy: Kueue's decisions about the RayCluster. Condition Admitted, and the questions of the other policies.

    the queue in force = the spec's, else that of the RayCluster's label, which Kueue writes for its default queue

Only Kueue writes `spec.suspend` of a RayCluster in a queue. The RayCluster is kept, so the job keeps its place. If the
queue evicts the job, its pods are deleted at once, delayed by their preStop hook. No deadline runs while the job is
queued. `suspension.py` makes the graceful stop.

Kueue also suspends RayClusters without a queue where `manageJobsWithoutQueueName` is set. They are recognised by their
Workload. Kueue creates it after the suspension: a moment later, or, if the RayCluster has pods, when they are deleted.
"""

from dataclasses import replace
from datetime import timedelta

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.plan import Cluster, Workload
from ppojob_operator.reconcile.situation import Finding, Situation

_MAX_WORDS = 1500
_WORKLOAD_DELAY = timedelta(seconds=60)
"""Longest time from the creation of a RayCluster that Kueue suspends to that of its Workload."""


def with_default_queue(situation: Situation) -> Situation:
    """Return the situation with the queue that Kueue has given to the RayCluster of a job without one."""
    queue, desired = situation.cluster.queue if situation.cluster else None, situation.desired
    if queue is None or situation.spec.run_policy.queue_name is not None:
        return situation
    queued = None if desired is None else _in_queue(desired, queue)
    return replace(situation, spec=_in_queue(situation.spec, queue), desired=queued)


def _in_queue(spec: PPOJobSpec, queue: str) -> PPOJobSpec:
    return spec.model_copy(update={"run_policy": spec.run_policy.model_copy(update={"queue_name": queue})})


def is_managed(situation: Situation) -> bool:
    """Return whether Kueue decides about the job: it has a queue, or Kueue has suspended its RayCluster without one."""
    if situation.spec.run_policy.queue_name is not None:
        return True
    cluster = situation.cluster
    if cluster is None or not cluster.is_suspended or situation.observed.workloads is None:
        return False
    return _workload(situation) is not None or _may_get_workload(situation, cluster)


def _may_get_workload(situation: Situation, cluster: Cluster) -> bool:
    is_new = cluster.created is not None and situation.now - cluster.created < _WORKLOAD_DELAY
    return is_new or any(pod.cluster == cluster.name for pod in situation.observed.pods)


def is_queued(situation: Situation) -> bool:
    """Return whether the job is waiting for Kueue's admission, without a trainer."""
    if situation.submitted_at is not None or not is_managed(situation):
        return False
    return situation.cluster is None or situation.cluster.is_suspended


def is_evicted(situation: Situation) -> bool:
    """Return whether the queue evicts an attempt with a trainer.

    This remains true if Kueue admits the RayCluster again before the operator has seen the end of the trainer.
    """
    if situation.submitted_at is None or situation.cluster is None:
        return False
    stop = situation.open_stop
    is_stopping = stop is not None and stop.reason == Reason.PREEMPTED
    return is_stopping or (situation.cluster.is_suspended and is_managed(situation))


def has_lost_all(situation: Situation) -> bool:
    """Return whether the pods of an evicted attempt are deleted."""
    is_suspended = situation.cluster is not None and situation.cluster.is_suspended
    own = (pod for pod in situation.observed.pods if pod.cluster == situation.cluster_name)
    # In a RayCluster that was admitted again, the remaining pods are those of the next attempt.
    return not any(pod.is_deleting or is_suspended for pod in own)


def admitted(situation: Situation) -> Finding | None:
    """Return condition Admitted; None: Kueue has never managed the job."""
    queue, cluster = situation.spec.run_policy.queue_name, situation.cluster
    if not is_managed(situation):
        return _not_managed(situation)
    workload, subject = _workload(situation), "Kueue" if queue is None else f"the queue {queue}"
    if is_evicted(situation):
        words = f": {workload.eviction[:_MAX_WORDS]}" if workload and workload.eviction else ""
        return Finding("False", Reason.PREEMPTED, f"{subject} has evicted the job{words}")
    if cluster is None:
        return Finding("False", Reason.QUEUED, f"the job is being added to {subject}")
    if cluster.is_suspended:
        words = _names_no_queue(cluster) if queue is None else f"the job waits in {subject}"
        return Finding("False", Reason.QUEUED, f"{words}{_waits_for(workload)}")
    if workload is None and not _was_admitted(situation):
        words = (
            "Kueue does not manage the RayCluster, so the job runs without a queue: "
            "turn on its integration ray.io/raycluster"
        )
        return Finding("Unknown", Reason.NOT_QUEUED, words)
    return Finding("True", Reason.ADMITTED, f"{subject} has admitted the job")


def _not_managed(situation: Situation) -> Finding | None:
    if situation.condition(Condition.ADMITTED) is None:
        return None
    return Finding("Unknown", Reason.NOT_QUEUED, "Kueue does not manage the job any more, so it runs without a queue")


def _names_no_queue(cluster: Cluster) -> str:
    label = f"kubectl label raycluster {cluster.name} {constants.LABEL_QUEUE}=QUEUE"
    return (
        "Kueue has suspended the RayCluster, because it manages RayClusters without a queue "
        f"(manageJobsWithoutQueueName), and admits none of them: name a queue with `{label}`, or create the job with "
        "spec.runPolicy.queueName"
    )


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
    before = (
        f"; it was admitted earlier and then evicted: {workload.eviction[:_MAX_WORDS]}" if workload.eviction else ""
    )
    return f": {workload.waits_for[:_MAX_WORDS]}{before}"


def _was_admitted(situation: Situation) -> bool:
    admitted = situation.condition(Condition.ADMITTED)
    return admitted is not None and admitted.status == "True"
