"""Whose job is it? The loop asks before each look, so that of two operators that see a job only one does anything.

`reconcile.ownership` decides; here are its facts (the Leases of other operators, looked at rarely) and its deeds: the
status says whose the job is before anything is made for it, and a job that is left alone is told of once. A job that is
ours costs no call. It knows nothing else of a job.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from time import monotonic

from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_operator.api_server import ApiError, ApiRefused, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.leadership import Lease
from ppojob_operator.plan import EventRecord, Job, JobKey, OtherLease
from ppojob_operator.reconcile import ownership
from ppojob_operator.reconcile.status import owned
from ppojob_operator.settings import Settings

logger = logging.getLogger(__name__)

_LEASE_SECONDS = 10.0
"""For so long a Lease of another operator is not looked at again, however many jobs it has."""


def own_identity(settings: Settings) -> OperatorStatus:
    """Return who this operator is: all replicas of a release are the same one."""
    return OperatorStatus(namespace=settings.namespace, lease=settings.lease_name, version=version("ppojob"))


@dataclass
class _Seen:
    """What is known of another operator's Lease. Times are of the monotonic clock."""

    lease: Lease | None
    """None: we may not look at it."""
    changed_at: float
    read_at: float


class Adopter:
    """Which jobs are ours."""

    def __init__(
        self, cluster: Cluster, own: OperatorStatus, patience: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """Look after claims.

        Args:
            cluster: the API server.
            own: who this operator is.
            patience: how long another operator's Lease must show no sign of life, in seconds.
            clock: seconds that only grow.
        """
        self._cluster = cluster
        self._own = own
        self._patience = patience
        self._clock = clock
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._left_alone: set[JobKey] = set()
        self._emitted: dict[JobKey, str] = {}

    @property
    def num_left_alone(self) -> int:
        """How many jobs that this operator sees are left to another one."""
        return len(self._left_alone)

    async def adopt(self, job: Job) -> Job | None:
        """Return the job with a status that says that it is ours, or None: it is another operator's.

        Raises:
            ApiError: the claim could not be written, or another operator was quicker; look again.
        """
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

    def forget(self, key: JobKey) -> None:
        """Forget a job that is gone."""
        self._left_alone.discard(key)
        self._emitted.pop(key, None)

    async def _observe_lease(self, other: OperatorStatus) -> OtherLease | None:
        place, now = (other.namespace, other.lease), self._clock()
        seen = self._seen.get(place)
        if seen is None or now >= seen.read_at + _LEASE_SECONDS:
            seen = self._seen[place] = await self._read(place, seen, now)
        # Up to the last look at it: what came since then is not known.
        return None if seen.lease is None else OtherLease(seen.read_at - seen.changed_at, seen.lease.duration)

    async def _read(self, place: tuple[str, str], before: _Seen | None, now: float) -> _Seen:
        try:
            raw = await self._cluster.read_lease(*place)
        except ApiRefused:
            return _Seen(None, now, now)
        # One that is missing says as little as one that nobody renews, and may be on its way back.
        lease = Lease() if raw is None else Lease.read(raw)
        is_as_before = before is not None and before.lease == lease
        return _Seen(lease, before.changed_at if before is not None and is_as_before else now, now)

    async def _emit_once(self, job: Job, event: EventRecord | None) -> None:
        """Say in the log and in an Event what is so, once for as long as it is so."""
        if event is None:
            self._emitted.pop(job.key, None)
            return
        if self._emitted.get(job.key) == event.reason:
            return
        self._emitted[job.key] = event.reason
        logger.log(logging.WARNING if event.is_warning else logging.INFO, "%s: %s", job.key, event.message)
        try:
            await self._cluster.emit(job, event)
        except ApiError as error:
            logger.info("%s: the Event about it could not be written: %s", job.key, error)
