"""The labels of a RayCluster by which queues and gang schedulers know it.

Kueue reads its own; what KubeRay 1.6's batch scheduler plugins read, they put on the pods, with the scheduler's name.
The operator sets no scheduler itself: which one there is, KubeRay was told when it was started.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.runtime import GangScheduler, RunPolicy
from ppojob_operator.plan import Manifest

Labels = dict[str, str | None]


def queue_labels(policy: RunPolicy, cluster: str) -> dict[str, str]:
    """Return the labels of a RayCluster.

    With a queue, Kueue owns its `spec.suspend` and parts of its pod templates. So the first is never written, and what
    Kueue has added to the others stays (`with_kueue_fields`).
    """
    labels: Labels = {
        constants.LABEL_QUEUE: policy.queue_name,
        constants.LABEL_QUEUE_PRIORITY: policy.queue_priority_class,
        **_GANG_SCHEDULERS[policy.gang_scheduler](policy.gang_scheduler_queue, cluster),
    }
    return {label: value for label, value in labels.items() if value is not None}


def queue_annotations(policy: RunPolicy, spec: Manifest) -> dict[str, dict[str, str]]:
    """Return the annotations of a RayCluster with a queue: of which spec it was made, as a digest.

    Kueue writes into the spec and evicts what is edited. So only by this can an operator of another version, which
    would make another spec, tell that nobody has edited it.
    """
    if policy.queue_name is None:
        return {}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {"annotations": {constants.ANNOTATION_MADE_OF: digest}}


def with_kueue_fields(desired: Manifest, found: Manifest) -> Manifest:
    """Return a RayCluster to be applied over the one that is there: in a queue, with what Kueue put into its pods.

    It is labels, annotations, node selectors, tolerations and scheduling gates. The list of groups is one field to
    server-side apply, which would take them away. The resourceVersion keeps the API server from taking what is older
    than Kueue's last word.
    """
    if constants.LABEL_QUEUE not in desired["metadata"]["labels"]:
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
    """Return a map or a list with what is only theirs added."""
    if isinstance(theirs, Mapping):
        return {**theirs, **(ours or {})}
    return [*(ours or []), *(item for item in theirs if item not in (ours or []))]


def _volcano(queue: str | None, _cluster: str) -> Labels:
    return {"volcano.sh/queue-name": queue}


def _yunikorn(queue: str | None, cluster: str) -> Labels:
    # What has the same application is one gang; each RayCluster is a gang of its own.
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
