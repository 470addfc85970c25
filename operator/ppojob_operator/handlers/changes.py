"""Filters the events of the watches: only a change that a policy can see triggers a reconcile.

`registry.py` calls it. Most events are filtered out: kubelet and KubeRay write many fields that no policy reads, and
reports and the operator itself write the PPOJob's status. It keeps a hash of each object.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from ppojob_operator.reading import read_cluster, read_fetch_job
from ppojob_operator.reading_pods import read_pod
from ppojob_operator.reconcile.status import OWNED

_METADATA = ("uid", "generation", "deletionTimestamp", "labels", "annotations", "finalizers")
# Reported fields that need no immediate reconcile: a timer detects missing reports, and autoBalance takes minutes.
_REPORTED = ("metrics", "checks", "pools", "fetch", "recommendation", "layoutAdvice")


class Changes:
    """The last seen state of each object."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def is_new(self, event: str | None, uid: str, view: Hashable) -> bool:
        """Return whether an event brings a change.

        Args:
            event: ADDED, MODIFIED or DELETED; None if the watch restarts and lists all objects.
            uid: of the object.
            view: the fields that policies read.
        """
        if event == "DELETED":
            self._seen.pop(uid, None)
            return True
        known, self._seen[uid] = self._seen.get(uid), hash(view)
        # A restarted watch reconciles everything, which finds the changes that it missed.
        return event is None or known != self._seen[uid]


def job_view(raw: Mapping[str, Any]) -> Hashable:
    """Return a PPOJob without what the operator and the reports write all the time."""
    metadata, status = raw["metadata"], raw.get("status", {})
    progress = status.get("progress", {})
    reported = {name: value for name, value in status.items() if name not in (*OWNED, *_REPORTED, "progress")}
    return repr(([metadata.get(name) for name in _METADATA], progress.get("activity"), reported))


def cluster_view(raw: Mapping[str, Any]) -> Hashable:
    """Return the fields of a RayCluster that policies read, including its spec."""
    return repr(read_cluster(raw))


def fetch_job_view(raw: Mapping[str, Any]) -> Hashable:
    """Return what the policies see of the Job that fetches models and data."""
    return read_fetch_job(raw)


def pod_view(raw: Mapping[str, Any]) -> Hashable:
    """Return the fields of a pod that policies read."""
    return read_pod(raw)
