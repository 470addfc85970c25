"""The labels of a RayCluster by which queues and gang schedulers know it.

Kueue reads its own; what KubeRay 1.6's batch scheduler plugins read, they put on the pods, with the scheduler's name.
The operator sets no scheduler itself: which one there is, KubeRay was told when it was started.
"""

from collections.abc import Callable, Mapping

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.runtime import GangScheduler, RunPolicy

Labels = dict[str, str | None]


def queue_labels(policy: RunPolicy, cluster: str) -> dict[str, str]:
    """Return the labels of a RayCluster.

    With a queue, Kueue owns its `spec.suspend` and parts of its pod templates. So the first is never written, and a
    RayCluster that is there is never applied again.
    """
    labels: Labels = {
        constants.LABEL_QUEUE: policy.queue_name,
        constants.LABEL_QUEUE_PRIORITY: policy.queue_priority_class,
        **_GANG_SCHEDULERS[policy.gang_scheduler](policy.gang_scheduler_queue, cluster),
    }
    return {label: value for label, value in labels.items() if value is not None}


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
