"""Labels and annotations of a RayCluster and its pods for Kueue and gang schedulers.

Kueue reads its labels from the RayCluster. KubeRay 1.6's batch scheduler plugins copy theirs to the pods and set
`schedulerName`; the scheduler is a setting of KubeRay, not of this operator.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.pools import Topology
from ppojob_api.v1alpha1.runtime import GangScheduler, RunPolicy
from ppojob_operator.plan import Manifest

Labels = dict[str, str | None]


def queue_labels(policy: RunPolicy, cluster: str) -> dict[str, str]:
    """Return the labels of a RayCluster.

    In a queue, Kueue owns `spec.suspend` and parts of the pod templates. The operator never writes the first, and keeps
    Kueue's additions to the second (`with_kueue_fields`).
    """
    labels: Labels = {
        constants.LABEL_QUEUE: policy.queue_name,
        constants.LABEL_QUEUE_PRIORITY: policy.queue_priority_class,
        **_GANG_SCHEDULERS[policy.gang_scheduler](policy.gang_scheduler_queue, cluster),
    }
    return {label: value for label, value in labels.items() if value is not None}


def topology_annotations(topology: Topology) -> dict[str, str]:
    """Return the annotation of a pod template from which Kueue reads where the pods may be."""
    levels = {
        constants.ANNOTATION_REQUIRED_TOPOLOGY: topology.required,
        constants.ANNOTATION_PREFERRED_TOPOLOGY: topology.preferred,
    }
    return {name: label for name, label in levels.items() if label is not None}


def made_of(spec: Manifest) -> dict[str, str]:
    """Return the annotation of a RayCluster: the digest of the spec that it was created from.

    Kueue changes the spec, and evicts RayClusters that others change. An operator of another version may render another
    spec; the digest shows that the difference is not an edit to revert. Every RayCluster has it, because Kueue may put
    it into a default queue.
    """
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {constants.ANNOTATION_MADE_OF: digest}


def with_kueue_fields(desired: Manifest, found: Manifest) -> Manifest:
    """Return the RayCluster to apply to an existing one: in a queue, with Kueue's additions to the pod templates.

    These are labels, annotations, node selectors, tolerations and scheduling gates. For server-side apply, the list of
    worker groups is one field, so it would remove them. With the resourceVersion, the API server rejects the write if
    Kueue has changed the object since.
    """
    if constants.LABEL_QUEUE not in {**found["metadata"].get("labels", {}), **desired["metadata"]["labels"]}:
        return desired
    spec, live = desired["spec"], found["spec"]
    groups = {group["groupName"]: group for group in live.get("workerGroupSpecs", [])}
    worker_groups = [_beside_kueue(group, groups.get(group["groupName"], {})) for group in spec["workerGroupSpecs"]]
    head = _beside_kueue(spec["headGroupSpec"], live.get("headGroupSpec", {}))
    metadata = {**desired["metadata"], "resourceVersion": found["metadata"]["resourceVersion"]}
    return {**desired, "metadata": metadata, "spec": {**spec, "headGroupSpec": head, "workerGroupSpecs": worker_groups}}


def _beside_kueue(group: Manifest, live: Manifest) -> Manifest:
    template, found = group["template"], live.get("template", {})
    metadata, pod = dict(template["metadata"]), dict(template["spec"])
    for ours, theirs, names in (
        (metadata, found.get("metadata", {}), ("labels", "annotations")),
        (pod, found.get("spec", {}), ("nodeSelector", "tolerations", "schedulingGates")),
    ):
        ours |= {name: _joined(ours.get(name), theirs[name]) for name in names if theirs.get(name)}
    return {**group, "template": {**template, "metadata": metadata, "spec": pod}}


def _joined(ours: Any, theirs: Any) -> Any:
    """Return a map or a list with their additional entries."""
    if isinstance(theirs, Mapping):
        return {**theirs, **(ours or {})}
    return [*(ours or []), *(item for item in theirs if item not in (ours or []))]


def _volcano(queue: str | None, _cluster: str) -> Labels:
    return {"volcano.sh/queue-name": queue}


def _yunikorn(queue: str | None, cluster: str) -> Labels:
    # Pods with the same application id are one gang, so each RayCluster has its own id.
    application = {"ray.io/gang-scheduling-enabled": "true", "yunikorn.apache.org/app-id": cluster}
    return {**application, "yunikorn.apache.org/queue": queue}


def _kai(queue: str | None, _cluster: str) -> Labels:
    return {"kai.scheduler/queue": queue}


_GANG_SCHEDULERS: Mapping[GangScheduler, Callable[[str | None, str], Labels]] = {
    GangScheduler.NONE: lambda queue, cluster: {},
    GangScheduler.VOLCANO: _volcano,
    GangScheduler.YUNIKORN: _yunikorn,
    GangScheduler.KAI: _kai,
}
