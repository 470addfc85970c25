"""Policy: a RayCluster that somebody else edited gets back what the job's layout says, and a deleted one is made again.

Every field that the operator has set is compared (`edits`). In a queue too: Kueue only adds to pod templates and writes
`spec.suspend`, which we never set, and `manifests.queues` sees to it that what it added stays. There it is done only to
a RayCluster that was made of the spec that is desired: Kueue evicts what changes, and neither a newer operator nor an
edit of runPolicy is worth that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import EventRecord, Manifest
from ppojob_operator.reconcile.edits import edits
from ppojob_operator.reconcile.situation import Situation

_FIRST_GENERATION = 1
_MAX_NAMED = 5


@dataclass(frozen=True)
class Restoration:
    """The RayCluster as it should be, and what is told about it."""

    manifest: Manifest
    event: EventRecord


def judge(situation: Situation) -> Restoration | None:
    """Return what restores the attempt's RayCluster; None where nothing was edited."""
    cluster = situation.cluster
    if cluster is None or cluster.generation <= _FIRST_GENERATION:
        return None
    desired = ray_cluster(situation.spec, situation.job.key, situation.job.uid, cluster.name)
    if desired["metadata"].get("annotations", {}).get(constants.ANNOTATION_MADE_OF) not in (None, cluster.created_from):
        return None
    found = [*edits(desired["spec"], cluster.spec, "spec"), *_added_groups(desired["spec"], cluster.spec)]
    if not found:
        return None
    message = f"RayCluster {cluster.name} was edited by somebody else and is as the job wants it again: "
    message += "; ".join(found[:_MAX_NAMED]) + (" ..." if len(found) > _MAX_NAMED else "")
    return Restoration(desired, EventRecord(Reason.CLUSTER_RESTORED, message, True, Condition.POOLS_READY))


def recreated(situation: Situation) -> EventRecord | None:
    """Return what is told where a RayCluster that had no trainer yet was deleted, and is made again in this look.

    With a trainer it is the end of the attempt (`attempts.py`).
    """
    known = situation.status.ray_cluster
    is_missing = situation.cluster is None and known is not None and known.uid is not None
    if not is_missing or situation.submitted_at is not None or situation.now < situation.due:
        return None
    message = f"RayCluster {situation.cluster_name} was deleted by somebody else and is made again"
    return EventRecord(Reason.CLUSTER_RESTORED, message, is_warning=True, action=Condition.POOLS_READY)


def _added_groups(desired: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the groups that nobody asked for: their pods take GPUs. Applying the desired spec takes them away."""
    names = {group["groupName"] for group in desired["workerGroupSpecs"]}
    for group in found.get("workerGroupSpecs", []):
        if group["groupName"] not in names:
            yield f"spec.workerGroupSpecs[{group['groupName']}] was added"
