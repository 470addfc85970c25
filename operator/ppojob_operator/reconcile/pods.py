"""Policy: the pods of the pools and the head. Condition PoolsReady, also of an attempt that has lost pods.

`attempts.py` judges whether the loss of a pod fails the attempt. A pod has the reason of its eviction only until it is
deleted, so condition PoolsReady keeps it.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.status import PoolStatus
from ppojob_operator.manifests import quotas
from ppojob_operator.manifests.quantity import times
from ppojob_operator.manifests.submission import pods_digest, pods_key
from ppojob_operator.plan import ALIVE, Cluster, Pod, RayJob, Trouble
from ppojob_operator.reconcile import queueing
from ppojob_operator.reconcile.situation import Finding, Situation

_MAX_WORDS = 1000
_SEVERITY = (
    Reason.IMAGE_PULL_FAILED,
    Reason.OUT_OF_MEMORY,
    Reason.POD_FAILED,
    Reason.PODS_REFUSED,
    Reason.INSUFFICIENT_GPUS,
    Reason.UNSCHEDULABLE,
)
"""Order in which one of several problems becomes the reason: first those that waiting does not solve."""
CAPACITY_REASONS = (Reason.INSUFFICIENT_GPUS, Reason.UNSCHEDULABLE)
"""Reasons that pods of an earlier attempt may cause until they are deleted."""
SILENCE = timedelta(seconds=120)
"""Time without responses of dashboard and trainer after which the head counts as lost."""
_KUBERAY = "ray.io/kuberay-operator"
"""KubeRay's own name in `spec.managedBy` of a RayCluster."""
_MULTIKUEUE = "MultiKueue is not supported, so create the job in a queue whose ClusterQueue does not use it"
_TAKEN = (Reason.PREEMPTED, Reason.NODE_LOST)


@dataclass(frozen=True)
class PoolsFinding:
    """Condition PoolsReady and the status of each pool."""

    finding: Finding
    pools: tuple[PoolStatus, ...]
    ready: str
    """GPUs ready / desired."""

    @property
    def is_ready(self) -> bool:
        """Whether all pods are ready."""
        return self.finding.status == "True"


def pools_ready(situation: Situation) -> PoolsFinding:
    """Return condition PoolsReady and the status of each pool."""
    pools = situation.spec.pools
    pods = {pool.name: [pod for pod in situation.pods if pod.pool == pool.name] for pool in pools}
    num_ready = {name: sum(pod.is_ready for pod in group) for name, group in pods.items()}
    troubles = {pool.name: _pool_trouble(pool, pods[pool.name]) for pool in pools}
    ready_gpus = sum(min(num_ready[pool.name], pool.nodes) * pool.gpus_per_node for pool in pools)
    desired_gpus = sum(pool.gpus for pool in pools)
    statuses = tuple(
        PoolStatus(
            name=pool.name,
            desired_nodes=pool.nodes,
            ready_nodes=num_ready[pool.name],
            gpus=pool.gpus,
            message=_joined([trouble]) if (trouble := troubles[pool.name]) else None,
        )
        for pool in pools
    )
    # An elastic pool that has enough pods waits for the others while the trainer runs.
    waiting = [troubles[pool.name] for pool in pools if num_ready[pool.name] < pool.needed_nodes or not pool.elastic]
    finding = _finding(situation, [trouble for trouble in waiting if trouble], num_ready)
    return PoolsFinding(finding, statuses, f"{ready_gpus}/{desired_gpus}")


def released(situation: Situation, finding: Finding) -> PoolsFinding:
    """Return the same for a job that releases its pods; `finding` is the condition."""
    pools = situation.spec.pools
    statuses = (PoolStatus(name=pool.name, desired_nodes=pool.nodes, ready_nodes=0, gpus=pool.gpus) for pool in pools)
    return PoolsFinding(finding, tuple(statuses), f"0/{sum(pool.gpus for pool in pools)}")


@dataclass(frozen=True)
class _PlacedTrouble:
    """A problem and where it is.

    place: `head`, `pool actor`, or a sentence on the pool's requests (`is_sentence`); empty for all pods.
    """

    place: str
    trouble: Trouble
    is_sentence: bool = False


def _finding(situation: Situation, troubles: list[_PlacedTrouble], num_ready: dict[str, int]) -> Finding:
    cluster, head, error = situation.cluster, situation.head, situation.observed.last_error
    if cluster is None:
        words = f"the RayCluster {situation.cluster_name} is being created"
        return Finding("False", Reason.CLUSTER_REFUSED, error) if error else _waiting(words)
    if without_pods := _without_pods(situation, cluster):
        return without_pods
    if head is not None and head.trouble is not None and not head.is_ready:
        troubles = [_PlacedTrouble("head", head.trouble), *troubles]
    not_ready = _not_ready(situation, num_ready)
    if not_ready and cluster.problem:
        words = f"KubeRay cannot create all pods: {cluster.problem[:_MAX_WORDS]}"
        if never := quotas.excess_of_cluster(cluster.problem, cluster.spec):
            words = f"the pods can never run: {never}; {words}"
        troubles = [*troubles, _PlacedTrouble("", Trouble(Reason.PODS_REFUSED, words))]
    if troubles:
        worst = min((each.trouble for each in troubles), key=lambda trouble: _SEVERITY.index(trouble.reason))
        words = _joined(troubles)
        if worst.reason in CAPACITY_REASONS and (leaving := situation.leaving_pods):
            names = ", ".join(pod.name for pod in leaving)
            return _waiting(f"waits for the deletion of the pods of an earlier attempt ({names[:_MAX_WORDS]}); {words}")
        return Finding("False", worst.reason, words)
    if not_ready:
        return _waiting("; ".join(not_ready))
    return Finding("True", Reason.PODS_READY, _ready_words(situation, num_ready))


def _joined(troubles: list[_PlacedTrouble]) -> str:
    """Return all messages in one. If places have the same problem, it is there once, after all of them."""
    groups: dict[str, list[_PlacedTrouble]] = {}
    for each in troubles:
        groups.setdefault(each.trouble.message, []).append(each)
    return "; ".join(_message(group) for group in groups.values())


def _message(group: list[_PlacedTrouble]) -> str:
    """Return all places of a problem, and the problem."""
    problem = group[0].trouble.message[:_MAX_WORDS]
    places = [each.place for each in group if each.place]
    if any(each.is_sentence for each in group):
        return "; ".join([*places, problem])
    return f"{', '.join(places)}: {problem}" if places else problem


def _ready_words(situation: Situation, num_ready: dict[str, int]) -> str:
    fewer = [
        f"pool {pool.name}, which is elastic, has {num_ready[pool.name]} of {pool.nodes}"
        for pool in situation.spec.pools
        if num_ready[pool.name] < pool.nodes
    ]
    return "; ".join(["the head and the pods of all pools are ready", *fewer])


def _without_pods(situation: Situation, cluster: Cluster) -> Finding | None:
    """Return why KubeRay creates no pods for the RayCluster; None: it does."""
    if cluster.managed_by not in (None, _KUBERAY):
        return _waiting(f"the RayCluster is managed by {cluster.managed_by}, so KubeRay creates no pods: {_MULTIKUEUE}")
    if not cluster.is_suspended:
        return None
    if queueing.is_managed(situation):
        return _waiting(f"the RayCluster {cluster.name} is suspended by Kueue: see the condition Admitted")
    words = f"the RayCluster {cluster.name} is suspended: somebody set its spec.suspend"
    return Finding("False", Reason.CLUSTER_SUSPENDED, words)


def _not_ready(situation: Situation, num_ready: dict[str, int]) -> list[str]:
    """Return what is not ready yet, starting with the head."""
    head = situation.head
    return [
        *(["the head pod is not ready"] if head is None or not head.is_ready else []),
        *(
            f"pool {pool.name} has {num_ready[pool.name]} of {_needed(pool)} pods ready"
            for pool in situation.spec.pools
            if num_ready[pool.name] < pool.needed_nodes
        ),
    ]


def _needed(pool: Pool) -> str:
    return str(pool.nodes) if pool.elastic is None else f"at least {pool.needed_nodes}"


def _waiting(words: str) -> Finding:
    return Finding("False", Reason.WAITING_FOR_PODS, words)


def _pool_trouble(pool: Pool, pods: list[Pod]) -> _PlacedTrouble | None:
    """Return the most severe problem of the pool's pods, with the pool's requests if the scheduler reports it."""
    troubles = Counter(pod.trouble for pod in pods if pod.trouble and not pod.is_ready)
    if not troubles:
        return None
    trouble, _ = max(troubles.items(), key=lambda item: (-_SEVERITY.index(item[0].reason), item[1]))
    if requests := _requests(pool, trouble):
        return _PlacedTrouble(f"pool {pool.name} requests {requests}", trouble, is_sentence=True)
    return _PlacedTrouble(f"pool {pool.name}", trouble)


def _requests(pool: Pool, trouble: Trouble) -> str:
    """Return what each pod of the pool requests and the scheduler does not find; empty for any other problem."""
    each = pool.resources_per_gpu
    if trouble.reason == Reason.INSUFFICIENT_GPUS:
        return f"{' and '.join(_devices(pool))} per node"
    if trouble.reason != Reason.UNSCHEDULABLE:
        return ""
    requests = [f"{times(each.cpu, pool.gpus_per_node)} cpu and {times(each.memory, pool.gpus_per_node)} memory"]
    if devices := _devices(pool):
        requests.insert(0, f"{', '.join(devices)},")
    selector = ", ".join(f"{name}={value}" for name, value in pool.node_selector.items())
    where = f" on nodes with {selector}" if selector else ""
    return f"{' '.join(requests)} per node{where}"


def _devices(pool: Pool) -> list[str]:
    """Return the extended resources and ResourceClaims that each pod requests, as phrases."""
    rdma = pool.network.rdma
    return [
        *([f"{pool.gpus_per_node} {pool.gpu_resource_name}"] if pool.gpu_resource_name else []),
        *([f"{rdma.count} {rdma.resource_name}"] if rdma is not None else []),
        *(f"a claim of template {claim.resource_claim_template_name}" for claim in pool.resource_claims),
    ]


def all_pods(situation: Situation) -> list[Pod]:
    """Return the pods of the attempt, including those that are being deleted."""
    return [pod for pod in situation.observed.pods if pod.cluster == situation.cluster_name]


def fixed_pods(situation: Situation) -> list[Pod]:
    """Return the pods of the attempt without those of elastic pools, whose loss the trainer itself survives."""
    elastic = {pool.name for pool in situation.spec.pools if pool.elastic is not None}
    return [pod for pod in all_pods(situation) if pod.pool not in elastic]


def is_reporting(situation: Situation) -> bool:
    """Return whether reports of the running attempt arrive, or the first one is not overdue yet."""
    since = situation.reported_at or situation.submitted_at
    return since is not None and situation.now - since <= SILENCE


def is_held(situation: Situation) -> bool:
    """Return whether the preStop hook of pods that are being deleted waits for a trainer that reports.

    A new attempt would fence this trainer out before it has saved its checkpoint.
    """
    return any(pod.is_deleting for pod in fixed_pods(situation)) and is_reporting(situation)


def lost(situation: Situation) -> Finding | None:
    """Return condition PoolsReady of an attempt that has lost pods; None: it has lost none, or was not submitted."""
    if situation.submitted_at is None:
        return None
    lost = "" if situation.ray_job is None else _lost_workers(situation, situation.ray_job)
    is_head_leaving = any(pod.pool is None and pod.is_deleting and pod.disruption for pod in all_pods(situation))
    if not lost and not is_head_leaving:
        return None
    return taken(situation, lost) or Finding("False", Reason.POD_LOST, lost)


def taken(situation: Situation, lost: str = "") -> Finding | None:
    """Return the disruption of the attempt's pods, as a finding; None: none is known. `lost` names the lost pods."""
    for pod in fixed_pods(situation):
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
    left = [pod for pod in fixed_pods(situation) if not pod.is_deleting]
    return all(pod.is_ready or (pod.created is not None and pod.created >= since) for pod in left)


def _lost_workers(situation: Situation, ray_job: RayJob) -> str:
    """Return which pools have lost pods that the attempt started with; empty: none.

    A pod that is only not ready is not lost while the running trainer reports: the kubelet may have restarted, or a
    probe timed out under load.
    """
    is_alive = ray_job.state in ALIVE and is_reporting(situation)
    lines = []
    for pool in (pool for pool in situation.spec.pools if pool.elastic is None):
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
