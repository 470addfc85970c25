"""Policy: a RayCluster that somebody else edited gets back what the job's layout says, and a deleted one is made again.

What KubeRay acts upon is compared: which groups there are, how many pods each has, and what its containers run and
ask for. In a queue that is Kueue's affair: written again, a RayCluster would lose what Kueue has added to its pods.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import EventRecord, Manifest
from ppojob_operator.reconcile.situation import Situation

_FIRST_GENERATION = 1
_MAX_NAMED = 5
_SIZES = ("replicas", "minReplicas", "maxReplicas")
_AUTOSCALING = "enableInTreeAutoscaling"


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


def remade(situation: Situation) -> EventRecord | None:
    """Return what is told where a RayCluster that had no trainer yet was deleted, and is made again in this look.

    With a trainer it is the end of the attempt (`attempts.py`).
    """
    known = situation.status.ray_cluster
    is_missing = situation.cluster is None and known is not None and known.uid is not None
    if not is_missing or situation.submitted_at is not None or situation.now < situation.due:
        return None
    message = f"RayCluster {situation.cluster_name} was deleted by somebody else and is made again"
    return EventRecord(Reason.CLUSTER_RESTORED, message, is_warning=True, action=Condition.POOLS_READY)


def edited(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each difference that applying the wanted spec again undoes.

    What somebody added to a container is not among them: server-side apply leaves fields that it does not set.
    """
    groups = {group["groupName"]: group for group in found.get("workerGroupSpecs", [])}
    names = [group["groupName"] for group in wanted["workerGroupSpecs"]]
    yield from (f"spec.workerGroupSpecs[{name}] was added" for name in groups if name not in names)
    pairs = [("headGroupSpec", wanted["headGroupSpec"], found.get("headGroupSpec", {}))]
    for group in wanted["workerGroupSpecs"]:
        pairs.append((f"workerGroupSpecs[{group['groupName']}]", group, groups.get(group["groupName"], {})))
    expected, actual = {_AUTOSCALING: wanted[_AUTOSCALING]}, {_AUTOSCALING: found.get(_AUTOSCALING, False)}
    for path, ours, theirs in pairs:
        expected |= dict(_essence(path, ours))
        actual |= dict(_essence(path, theirs))
    for path, value in expected.items():
        if actual.get(path) != value:
            yield f"spec.{path} was {actual.get(path, 'nothing')} in place of {value}"


def _essence(path: str, group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _SIZES:
        if name in group:
            yield f"{path}.{name}", group[name]
    for container in group.get("template", {}).get("spec", {}).get("containers", []):
        where = f"{path}.template.spec.containers[{container.get('name')}]"
        yield f"{where}.image", container.get("image")
        for kind in ("requests", "limits"):
            for name, amount in container.get("resources", {}).get(kind, {}).items():
                yield f"{where}.resources.{kind}.{name}", _amount(amount)


def _amount(text: Any) -> str:
    """Return a quantity in one way of writing: a client may have put 500m for 0.5."""
    try:
        return f"{parse_quantity(str(text)).normalize():f}"
    except ValueError:
        return str(text)
