"""Policy: reverts edits of the RayCluster by other clients, and re-creates it if it was deleted before its trainer.

Every field that the operator sets is compared (`edits`). In a queue, Kueue only adds to pod templates, which
`manifests.queues` keeps, and writes `spec.suspend`, which the operator never sets. There, edits are reverted only if
the RayCluster was created from the desired spec, because Kueue evicts changed objects, and neither a newer operator nor
an edit of runPolicy justifies an eviction.
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
    """The RayCluster to apply, and the Event about it."""

    manifest: Manifest
    event: EventRecord


def judge(situation: Situation) -> Restoration | None:
    """Return what reverts the edits of the attempt's RayCluster; None: there are none."""
    cluster = situation.cluster
    if cluster is None or cluster.generation <= _FIRST_GENERATION:
        return None
    desired = ray_cluster(situation.spec, situation.job.key, situation.job.uid, cluster.name)
    if desired["metadata"].get("annotations", {}).get(constants.ANNOTATION_MADE_OF) not in (None, cluster.created_from):
        return None
    found = [*edits(desired["spec"], cluster.spec, "spec"), *_added_groups(desired["spec"], cluster.spec)]
    if not found:
        return None
    message = f"RayCluster {cluster.name} was edited by another client; the edits were reverted: "
    message += "; ".join(found[:_MAX_NAMED]) + (" ..." if len(found) > _MAX_NAMED else "")
    return Restoration(desired, EventRecord(Reason.CLUSTER_RESTORED, message, True, Condition.POOLS_READY))


def recreated(situation: Situation) -> EventRecord | None:
    """Return the Event if a RayCluster without a trainer was deleted and is re-created by this reconcile.

    With a trainer, its deletion ends the attempt (`attempts.py`).
    """
    known = situation.status.ray_cluster
    is_missing = situation.cluster is None and known is not None and known.uid is not None
    if not is_missing or situation.submitted_at is not None or situation.now < situation.due:
        return None
    message = f"RayCluster {situation.cluster_name} was deleted by another client and is re-created"
    return EventRecord(Reason.CLUSTER_RESTORED, message, is_warning=True, action=Condition.POOLS_READY)


def _added_groups(desired: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield worker groups that the spec does not have, because they use GPUs. Applying the spec removes them."""
    names = {group["groupName"] for group in desired["workerGroupSpecs"]}
    for group in found.get("workerGroupSpecs", []):
        if group["groupName"] not in names:
            yield f"spec.workerGroupSpecs[{group['groupName']}] was added"
