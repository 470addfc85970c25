"""Policy: which pods has the current attempt lost, and why?

`attempts.py` judges whether the attempt has failed. A pod has the reason of its eviction only until it is deleted, so
condition PoolsReady keeps it.
"""

from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.manifests.submission import pods_digest, pods_key
from ppojob_operator.plan import ALIVE, Pod, RayJob
from ppojob_operator.reconcile.situation import Finding, Situation

SILENCE = timedelta(seconds=120)
"""Time without responses of dashboard and trainer after which the head counts as lost."""
_TAKEN = (Reason.PREEMPTED, Reason.NODE_LOST)


def all_pods(situation: Situation) -> list[Pod]:
    """Return the pods of the attempt, including those that are being deleted."""
    return [pod for pod in situation.observed.pods if pod.cluster == situation.cluster_name]


def is_reporting(situation: Situation) -> bool:
    """Return whether reports of the running attempt arrive, or the first one is not overdue yet."""
    since = situation.reported_at or situation.submitted_at
    return since is not None and situation.now - since <= SILENCE


def is_held(situation: Situation) -> bool:
    """Return whether the preStop hook of pods that are being deleted waits for a trainer that reports.

    A new attempt would fence this trainer out before it has saved its checkpoint.
    """
    return any(pod.is_deleting for pod in all_pods(situation)) and is_reporting(situation)


def judge(situation: Situation) -> Finding | None:
    """Return condition PoolsReady of an attempt that has lost pods; None: it has not, or was not submitted."""
    if situation.submitted_at is None:
        return None
    lost = "" if situation.ray_job is None else _lost_workers(situation, situation.ray_job)
    is_head_leaving = any(pod.pool is None and pod.is_deleting and pod.disruption for pod in all_pods(situation))
    if not lost and not is_head_leaving:
        return None
    return taken(situation, lost) or Finding("False", Reason.POD_LOST, lost)


def taken(situation: Situation, lost: str = "") -> Finding | None:
    """Return the disruption of the attempt's pods, as a finding; None: none is known. `lost` names the lost pods."""
    for pod in all_pods(situation):
        if pod.disruption is not None and (pod.is_deleting or not pod.is_ready):
            words = f"pod {pod.name}: {pod.disruption.message}"
            return Finding("False", pod.disruption.reason, f"{words}; {lost}" if lost else words)
    before = situation.condition(Condition.POOLS_READY)
    is_known = before is not None and before.status == "False" and before.reason in _TAKEN
    return Finding("False", before.reason, before.message) if before is not None and is_known else None


def are_replaced(situation: Situation) -> bool:
    """Return whether only deleted worker pods are missing from the RayCluster, which KubeRay re-creates.

    A pod that the attempt started with, and that exists but is not ready, may be on a lost node. Waiting for it would
    take until Kubernetes evicts it.
    """
    head, since = situation.head, situation.submitted_at
    if head is None or not head.is_ready or since is None:
        return False
    return all(pod.is_ready or (pod.created is not None and pod.created >= since) for pod in situation.pods)


def _lost_workers(situation: Situation, ray_job: RayJob) -> str:
    """Return which pools have lost pods that the attempt started with; empty: none.

    A pod that is only not ready is not lost while the running trainer reports: the kubelet may have restarted, or a
    probe timed out under load.
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
            lines.append(f"pool {pool.name} has other pods than those that the trainer started with")
    return "; ".join(lines)
