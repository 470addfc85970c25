"""Which events of the watches are worth a look: those that change what a policy would see.

`registry.py` asks. Most events are not: kubelet and KubeRay write many fields that nobody here reads, every report
changes its PPOJob's status, and so does each status that the operator writes itself. Of each object a hash is kept.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from ppojob_operator.reconcile import read_cluster, read_fetch_job, read_pod
from ppojob_operator.reconcile.status import OWNED

_METADATA = ("uid", "generation", "deletionTimestamp", "labels", "annotations", "finalizers")
# What trainer and fetch report and no policy needs at once: silence is found by the clock, advice taken in minutes.
_REPORTED = ("metrics", "pools", "fetch", "recommendation", "layoutAdvice")


class Changes:
    """What was told last of each object."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def is_new(self, event: str | None, uid: str, view: Hashable) -> bool:
        """Return whether an event tells something new.

        Args:
            event: ADDED, MODIFIED or DELETED; None where the watch begins anew and lists what is there.
            uid: of the object.
            view: what matters of it.
        """
        if event == "DELETED":
            self._seen.pop(uid, None)
            return True
        known, self._seen[uid] = self._seen.get(uid), hash(view)
        # Whatever was missed while there was no watch is found by a look at everything.
        return event is None or known != self._seen[uid]


def job_view(raw: Mapping[str, Any]) -> Hashable:
    """Return what matters of a PPOJob: all but what the operator and the trainer's reports write all the time."""
    metadata, status = raw["metadata"], raw.get("status", {})
    progress = status.get("progress", {})
    reported = {name: value for name, value in status.items() if name not in (*OWNED, *_REPORTED, "progress")}
    return repr(([metadata.get(name) for name in _METADATA], progress.get("activity"), reported))


def cluster_view(raw: Mapping[str, Any]) -> Hashable:
    """Return what the policies see of a RayCluster, its spec too."""
    return repr(read_cluster(raw))


def fetch_job_view(raw: Mapping[str, Any]) -> Hashable:
    """Return what the policies see of the Job that fetches models and data."""
    return read_fetch_job(raw)


def pod_view(raw: Mapping[str, Any]) -> Hashable:
    """Return what the policies see of a pod."""
    return read_pod(raw)
