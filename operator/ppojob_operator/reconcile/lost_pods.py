"""Policy: which pods has the current attempt lost, and who took them?

`attempts.py` judges what that means. A pod tells who takes it while it leaves; from then on the condition PoolsReady
remembers it, because the pod is soon gone.
"""

from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.manifests.submission import pods_digest, pods_key
from ppojob_operator.plan import ALIVE, Pod, RayJob
from ppojob_operator.reconcile.situation import Finding, Situation

SILENCE = timedelta(seconds=120)
"""How long neither dashboard nor trainer may answer before the head counts as lost."""
_TAKEN = (Reason.PREEMPTED, Reason.NODE_LOST)


def all_pods(situation: Situation) -> list[Pod]:
    """Return the pods of the attempt with those that are being deleted: KubeRay is quick to clear up."""
    return [pod for pod in situation.observed.pods if pod.cluster == situation.cluster_name]


def is_reporting(situation: Situation) -> bool:
    """Return whether reports of the running attempt arrive, or it has had no time yet for the first one."""
    since = situation.reported_at or situation.submitted_at
    return since is not None and situation.now - since <= SILENCE


def is_held(situation: Situation) -> bool:
    """Return whether pods are leaving and a trainer that reports makes their hook hold them.

    Another attempt now would fence it out before its checkpoint.
    """
    return any(pod.is_deleting for pod in all_pods(situation)) and is_reporting(situation)


def judge(situation: Situation) -> Finding | None:
    """Return the condition PoolsReady of an attempt that has lost pods; None: it has not, or has not begun."""
    if situation.submitted_at is None:
        return None
    lost = "" if situation.ray_job is None else _lost_workers(situation, situation.ray_job)
    is_head_leaving = any(pod.pool is None and pod.is_deleting and pod.disruption for pod in all_pods(situation))
    if not lost and not is_head_leaving:
        return None
    return taken(situation, lost) or Finding("False", Reason.POD_LOST, lost)


def taken(situation: Situation, lost: str = "") -> Finding | None:
    """Return who takes pods of the attempt away, or took them; None: nobody is known to. `lost` is what is missing."""
    for pod in all_pods(situation):
        if pod.disruption is not None and (pod.is_deleting or not pod.is_ready):
            words = f"pod {pod.name}: {pod.disruption.message}"
            return Finding("False", pod.disruption.reason, f"{words}; {lost}" if lost else words)
    before = situation.condition(Condition.POOLS_READY)
    is_known = before is not None and before.status == "False" and before.reason in _TAKEN
    return Finding("False", before.reason, before.message) if before is not None and is_known else None


def are_replaced(situation: Situation) -> bool:
    """Return whether the RayCluster is sound but for worker pods that are gone: KubeRay makes those anew.

    A pod that the attempt began with and that is there, but not ready, may be on a node that was lost; it would be
    waited for until Kubernetes gives the node up.
    """
    head, since = situation.head, situation.submitted_at
    if head is None or not head.is_ready or since is None:
        return False
    return all(pod.is_ready or (pod.created is not None and pod.created >= since) for pod in situation.pods)


def _lost_workers(situation: Situation, ray_job: RayJob) -> str:
    """Return which pools have lost pods that the attempt began with; empty: none.

    A pod that is there and only not ready is not lost while a trainer that runs reports: the kubelet may have begun
    anew, or a probe come too late under load.
    """
    is_alive = ray_job.state in ALIVE and is_reporting(situation)
    lines = []
    for pool in situation.spec.pools:
        pods = [pod for pod in situation.pods if pod.pool == pool.name]
        kept = [pod for pod in pods if pod.is_ready or (is_alive and pod.trouble is None)]
        num_ready = sum(pod.is_ready for pod in pods)
        words = next((f" ({pod.trouble.message})" for pod in pods if pod.trouble), "")
        known = ray_job.metadata.get(pods_key(pool.name))
        if len(kept) < pool.nodes:
            lines.append(f"pool {pool.name} has only {num_ready} of its {pool.nodes} pods ready{words}")
        elif known is not None and known != pods_digest(pod.name for pod in kept):
            lines.append(f"pool {pool.name} has other pods than the trainer began with")
    return "; ".join(lines)
