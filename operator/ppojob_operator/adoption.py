"""Makes sure that only one operator reconciles a job. The loop calls `Adopter.adopt` before each reconcile.

`reconcile.ownership` decides. This module reads the Leases of other operators, at most every ten seconds, writes the
owner into `status.operator` before anything is created for the job, and emits one Event for a job of another operator.
A job that this operator already owns costs no API call. Jobs of a namespace that is not served are ignored or
released: their RayClusters are deleted here, because a job that is being released must not reach `reconcile.decide`,
which may also start it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_api.v1alpha1.versions import own_version
from ppojob_operator import ownership
from ppojob_operator.api_server import ApiError, ApiRefused, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.leadership import Lease
from ppojob_operator.manifests import naming
from ppojob_operator.plan import EventRecord, Job, JobKey, OtherLease
from ppojob_operator.reading import read_cluster, read_fetch_job
from ppojob_operator.reconcile.status import owned
from ppojob_operator.served_namespaces import ServedNamespaces
from ppojob_operator.settings import Settings

logger = logging.getLogger(__name__)

_LEASE_SECONDS = 10.0
"""Seconds between two reads of another operator's Lease, however many jobs it owns."""
_DELETION_SECONDS = 5.0
"""Seconds until a job is reconciled again that cannot be released yet. The watches usually report the end earlier."""


def own_identity(settings: Settings) -> OperatorStatus:
    """Return the identity of this operator. All replicas of a release share it."""
    return OperatorStatus(namespace=settings.namespace, lease=settings.lease_name, version=own_version())


@dataclass
class _Seen:
    """The last observation of another operator's Lease. Times are of the monotonic clock."""

    lease: Lease | None
    """None: the operator may not read it."""
    changed_at: float
    read_at: float


class Adopter:
    """Adopts jobs, and remembers which ones belong to other operators."""

    def __init__(
        self,
        cluster: Cluster,
        own: OperatorStatus,
        patience: float,
        namespaces: ServedNamespaces,
        requeue: Callable[[JobKey, float], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Adopt jobs for one operator.

        Args:
            cluster: the API server.
            own: the identity of this operator.
            patience: seconds without a renewal after which another operator's jobs are taken over.
            namespaces: those that this operator serves.
            requeue: enqueues a job, due after some seconds.
            clock: seconds that only grow.
        """
        self._cluster = cluster
        self._own = own
        self._patience = patience
        self._namespaces = namespaces
        self._requeue = requeue
        self._clock = clock
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._left_alone: set[JobKey] = set()
        self._emitted: dict[JobKey, str] = {}

    @property
    def num_left_alone(self) -> int:
        """Number of jobs that belong to another operator."""
        return len(self._left_alone)

    async def adopt(self, job: Job) -> Job | None:
        """Return the job with this operator in its status, or None if this operator does not reconcile it.

        Raises:
            ApiError: the owner could not be written, or another operator was faster; reconcile again.
        """
        is_served = self._namespaces.serves(job.key.namespace)
        if not is_served and ownership.may_leave(job, self._own):
            await self._release(job)
            return None
        rival = ownership.rival(job, self._own)
        other = None if rival is None else await self._observe_lease(rival)
        adoption = ownership.judge(job, self._own, other, self._patience)
        if not adoption.is_ours:
            self._left_alone.add(job.key)
            await self._emit_once(job, adoption.event)
            return None
        if adoption.status is not None and not await self._cluster.write_status(job, owned(adoption.status)):
            raise ApiUnavailable(f"PPOJob {job.key} was deleted or re-created while it was being adopted")
        self._left_alone.discard(job.key)
        await self._emit_once(job, adoption.event)
        return job if adoption.status is None else replace(job, status=adoption.status)

    async def _release(self, job: Job) -> None:
        """Ignore a job of a namespace that is not served; if it is ours, release it once its objects are deleted."""
        self._left_alone.discard(job.key)
        adoption = ownership.release(job, self._own, self._namespaces.rule)
        if adoption.status is None:
            # Another release may serve the namespace, so nothing is written unless the annotation names this one.
            if ownership.is_requested_of(job, self._own):
                await self._emit_once(job, adoption.event)
            else:
                self._log_once(job, adoption.event)
            return
        if await self._delete_objects(job):
            self._requeue(job.key, _DELETION_SECONDS)
            return
        if not await self._cluster.write_status(job, owned(adoption.status)):
            raise ApiUnavailable(f"PPOJob {job.key} was deleted or re-created while it was being released")
        await self._emit_once(job, adoption.event)

    async def _delete_objects(self, job: Job) -> bool:
        """Delete the RayClusters, their Secrets and the Job that fetches; return whether one of them is left.

        A Job that has ended stays for its log: it does not run, and is deleted by its TTL or with the PPOJob.
        """
        namespace, found = job.key.namespace, await self._cluster.list_clusters(job.key)
        clusters = [read_cluster(raw) for raw in found or () if naming.is_owned(raw, job.uid)]
        for name in (cluster.name for cluster in clusters if not cluster.is_deleting):
            logger.info("%s: RayCluster %s is deleted before the job is released", job.key, name)
            # The Secret first: after an interrupted reconcile, the next one finds the RayCluster and repeats both.
            await self._cluster.delete_secret(namespace, naming.dashboard_secret_name(name))
            await self._cluster.delete_cluster(namespace, name)
        raw = await self._cluster.read_fetch_job(job.key)
        fetch = read_fetch_job(raw) if raw is not None and naming.is_owned(raw, job.uid) else None
        if fetch is None or fetch.is_over:
            return bool(clusters)
        if not fetch.is_deleting:
            await self._cluster.delete_fetch_job(job.key)
        return True

    def forget(self, key: JobKey) -> None:
        """Forget a deleted job."""
        self._left_alone.discard(key)
        self._emitted.pop(key, None)

    async def _observe_lease(self, other: OperatorStatus) -> OtherLease | None:
        place, now = (other.namespace, other.lease), self._clock()
        seen = self._seen.get(place)
        if seen is None or now >= seen.read_at + _LEASE_SECONDS:
            seen = self._seen[place] = await self._read(place, seen, now)
        # Only up to the last read: a renewal may have followed.
        return None if seen.lease is None else OtherLease(seen.read_at - seen.changed_at, seen.lease.duration)

    async def _read(self, place: tuple[str, str], before: _Seen | None, now: float) -> _Seen:
        try:
            raw = await self._cluster.read_lease(*place)
        except ApiRefused:
            return _Seen(None, now, now)
        # A missing Lease counts as one that is not renewed; it may be created again soon.
        lease = Lease() if raw is None else Lease.read(raw)
        is_as_before = before is not None and before.lease == lease
        return _Seen(lease, before.changed_at if before is not None and is_as_before else now, now)

    async def _emit_once(self, job: Job, event: EventRecord | None) -> None:
        """Log and emit an Event, once until its message changes."""
        if not self._log_once(job, event) or event is None:
            return
        try:
            await self._cluster.emit(job, event)
        except ApiError as error:
            logger.info("%s: the Event could not be written: %s", job.key, error)

    def _log_once(self, job: Job, event: EventRecord | None) -> bool:
        """Log an Event, once until its message changes; return whether it was."""
        if event is None:
            self._emitted.pop(job.key, None)
            return False
        if self._emitted.get(job.key) == event.message:
            return False
        self._emitted[job.key] = event.message
        logger.log(logging.WARNING if event.is_warning else logging.INFO, "%s: %s", job.key, event.message)
        return True
