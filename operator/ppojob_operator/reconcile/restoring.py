"""Policy: a RayCluster that somebody else edited gets back what the job's layout says.

What KubeRay acts upon is compared: which groups there are, how many pods each has, and what its containers run and
ask for. In a queue that is Kueue's affair: written again, a RayCluster would lose what Kueue has added to its pods.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import EventRecord, Manifest
from ppojob_operator.reconcile.situation import Situation

_FIRST_GENERATION = 1
_MAX_NAMED = 5
_SIZES = ("replicas", "minReplicas", "maxReplicas")
_OF_CONTAINER = ("image", "resources")
_ABSENT = "nothing"


@dataclass(frozen=True)
class Restoration:
    """The RayCluster as it should be, and what is told about it."""

    manifest: Manifest
    event: EventRecord


def judge(situation: Situation) -> Restoration | None:
    """Return what restores the attempt's RayCluster; None where nothing was edited."""
    cluster = situation.cluster
    if situation.spec.run_policy.queue_name is not None:
        # Kueue has written into its pod templates, and looks after edits itself: what it let in must be what runs.
        return None
    if cluster is None or cluster.generation <= _FIRST_GENERATION:
        return None
    wanted = ray_cluster(situation.spec, situation.job.key, situation.job.uid, cluster.name)
    edits = list(edited(wanted["spec"], cluster.spec))
    if not edits:
        return None
    message = f"RayCluster {cluster.name} was edited by somebody else and is as the job wants it again: "
    message += "; ".join(edits[:_MAX_NAMED]) + (" ..." if len(edits) > _MAX_NAMED else "")
    return Restoration(wanted, EventRecord(Reason.CLUSTER_RESTORED, message, True, Condition.POOLS_READY))


def edited(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each difference that matters between two specs of a RayCluster."""
    expected, actual = dict(_essence(wanted)), dict(_essence(found))
    for path in sorted(expected.keys() | actual.keys()):
        before, after = expected.get(path, _ABSENT), actual.get(path, _ABSENT)
        if before != after:
            yield f"spec.{path} was {after} in place of {before}"


def _essence(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "enableInTreeAutoscaling", spec.get("enableInTreeAutoscaling", False)
    yield from _of_template("headGroupSpec", spec.get("headGroupSpec", {}))
    for group in spec.get("workerGroupSpecs", []):
        path = f"workerGroupSpecs[{group.get('groupName')}]"
        for name in _SIZES:
            yield f"{path}.{name}", group.get(name, _ABSENT)
        yield from _of_template(path, group)


def _of_template(path: str, group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for container in group.get("template", {}).get("spec", {}).get("containers", []):
        for name in _OF_CONTAINER:
            yield f"{path}.template.spec.containers[{container.get('name')}].{name}", container.get(name, _ABSENT)
