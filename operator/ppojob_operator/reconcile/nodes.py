"""Policy: `status.avoidedNodes`, which the next RayCluster avoids, because an attempt lost a pod or a GPU there.

A node is added when its pod is observed to be lost with it, because the pod may be deleted before the attempt has
failed. It is a preference: if no other node has room, the pods run there again. A node is forgotten after six hours,
and after progress of a later attempt on other nodes.
"""

from collections.abc import Iterable
from datetime import timedelta

from ppojob_api.v1alpha1.constants import MAX_AVOIDED_NODES, Reason
from ppojob_api.v1alpha1.status import AvoidedNode
from ppojob_operator.plan import Pod
from ppojob_operator.reconcile import pods
from ppojob_operator.reconcile.failure_policy import has_progressed
from ppojob_operator.reconcile.situation import Failure, Situation
from ppojob_operator.reconcile.status import format_time
from ppojob_operator.times import parse_time

_EXPIRY = timedelta(hours=6)


def avoided(situation: Situation, failure: Failure | None = None) -> list[AvoidedNode]:
    """Return the nodes to avoid from now on, the oldest first.

    failure: of the current attempt. None: it has not failed.
    """
    kept = {node.name: node for node in situation.status.avoided_nodes if not _is_forgotten(situation, node)}
    for name, reason in _faulty(situation, failure):
        known = kept.pop(name, None)
        is_known = known is not None and known.attempt == situation.attempt
        fresh = AvoidedNode(name=name, reason=reason, attempt=situation.attempt, time=format_time(situation.now))
        kept[name] = known if known is not None and is_known else fresh
    return sorted(kept.values(), key=lambda node: (node.time, node.name))[-MAX_AVOIDED_NODES:]


def hosts_pods(situation: Situation, nodes: Iterable[AvoidedNode]) -> bool:
    """Return whether a pod of the attempt is on one of the nodes, so that the next attempt must not reuse the pods."""
    return not {pod.node for pod in situation.pods}.isdisjoint({node.name for node in nodes})


def _is_forgotten(situation: Situation, node: AvoidedNode) -> bool:
    if situation.now - parse_time(node.time) >= _EXPIRY:
        return True
    return node.attempt < situation.attempt and has_progressed(situation) and not hosts_pods(situation, [node])


def _faulty(situation: Situation, failure: Failure | None) -> list[tuple[str, str]]:
    """Return the nodes of which a pod or a GPU of the attempt was lost, with the reason."""
    if situation.submitted_at is None:
        return []
    own = [pod for pod in pods.fixed_pods(situation) if pod.node]
    found = {pod.node: Reason.NODE_LOST for pod in own if _is_lost_with_its_node(pod)}
    if failure is not None and failure.address is not None:
        found |= {pod.node: Reason.GPU_FAULT for pod in own if pod.address == failure.address}
    return sorted(found.items())


def _is_lost_with_its_node(pod: Pod) -> bool:
    is_of_node = pod.disruption is not None and pod.disruption.reason == Reason.NODE_LOST
    return is_of_node and (pod.is_deleting or not pod.is_ready)
