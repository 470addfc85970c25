"""The leader election: acquires and renews the Lease, and cancels the leader's work when the Lease is lost.

      standby ──Lease free, or not renewed for its duration──▶ leader: the work runs, the Lease is renewed every retry
         ▲                                                       │     period
         └── not renewed until the renew deadline, or taken ─────┘     then the work is cancelled and `check` raises

The rules are those of client-go's `leaderelection`. A standby measures the duration by its own clock from the last
change that it saw, so clocks may differ. The leader stops at the renew deadline, which is shorter, so two replicas
never lead at the same time. `check` compares the time itself, so a process that was frozen notices that it no longer
leads before it writes anything. `main.py` runs it; it knows nothing about the leader's work.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from ppojob_operator.api_server import ApiError, ApiUnavailable
from ppojob_operator.leadership.lease import LEASES, Lease, LeasePort

logger = logging.getLogger(__name__)

Work = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""The leader's work. It runs until the event is set; an earlier end is an error."""

_JITTER = 1.2
_END_SECONDS = 30.0


@dataclass(frozen=True)
class ElectionTimes:
    """client-go's three times, in seconds."""

    duration: float = 15.0
    """Time after the last renewal that a standby saw before it may take the Lease."""
    renew_deadline: float = 10.0
    """Time after its last renewal at which the leader stops leading; shorter than `duration`."""
    retry_period: float = 2.0
    """Time between two attempts to acquire or renew the Lease."""


class Election:
    """One replica's participation in the election."""

    def __init__(
        self,
        port: LeasePort,
        place: tuple[str, str],
        identity: str,
        times: ElectionTimes,
        *,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Participate in the election.

        Args:
            port: the API server.
            place: namespace and name of the Lease.
            identity: name of this replica, unique to this process.
            times: the three times.
            beat: called after each attempt.
            clock: seconds that only grow.
        """
        self._port = port
        self._namespace, self._name = place
        self._identity = identity
        self._times = times
        self._beat = beat
        self._clock = clock
        self._until = float("-inf")
        self._seen: Lease | None = None
        self._seen_at = float("-inf")

    @property
    def leads(self) -> bool:
        """Whether this replica leads at this moment."""
        return self._clock() < self._until

    @property
    def leader(self) -> str | None:
        """The last known holder of the Lease. None: not read yet. Empty: nobody."""
        return None if self._seen is None else self._seen.holder

    def check(self) -> None:
        """Return if this replica leads.

        Raises:
            ApiUnavailable: it does not lead and must not write.
        """
        if not self.leads:
            raise ApiUnavailable(f"replica {self._identity} is not the leader: and writes nothing")

    async def run(self, stop: asyncio.Event, work: Work) -> None:
        """Be standby or leader until `stop` is set, then release the Lease.

        Raises:
            RuntimeError: the work did not end in time after the Lease was lost.
            Exception: what the work raises.
        """
        while await self._acquire(stop):
            await self._lead(stop, work)

    async def _acquire(self, stop: asyncio.Event) -> bool:
        """Wait until this replica leads; False if `stop` came first."""
        logged = None
        while not stop.is_set():
            if await self._try():
                return True
            # If the Lease cannot be read, the last known holder may be this replica.
            others = self.leader if self.leader != self._identity else ""
            if others != logged:
                logged = others
                logger.info("standing by: %s leads", logged or "no known replica")
            await _wait(stop, self._times.retry_period * random.uniform(1.0, _JITTER))
        return False

    async def _lead(self, stop: asyncio.Event, work: Work) -> None:
        """Run the leader's work until `stop` is set or the Lease is lost."""
        logger.info("leading as %s", self._identity)
        over = asyncio.Event()
        working = asyncio.create_task(work(over), name="the leader's work")
        renewing = asyncio.create_task(self._renew(), name="renewal of the Lease")
        stopping = asyncio.create_task(stop.wait(), name="stop of the election")
        try:
            await asyncio.wait({working, renewing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            over.set()
            # On a stop, keep the Lease until the reconciles in progress are finished.
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            await _ended(working)
        finally:
            for task in (working, renewing, stopping):
                task.cancel()
            await asyncio.wait({working, renewing, stopping}, timeout=_END_SECONDS)
            await self._release()

    async def _renew(self) -> None:
        """Renew the Lease until it is lost."""
        while self.leads:
            await asyncio.sleep(min(self._times.retry_period, self._until - self._clock()))
            if self.leads:
                await self._try()
        logger.warning("the Lease %s/%s is lost: this replica is a standby now", self._namespace, self._name)

    async def _try(self) -> bool:
        """Acquire or renew the Lease; return whether that succeeded."""
        began = self._clock()
        # A call that hangs must leave time for a second one.
        limit = self._times.renew_deadline / 2
        try:
            async with asyncio.timeout(min(limit, self._until - began) if self.leads else limit):
                is_ours = await self._take()
        except TimeoutError:
            logger.warning("the Lease %s/%s: the request timed out", self._namespace, self._name)
            is_ours = False
        except ApiError as error:
            logger.warning("the Lease %s/%s: %s", self._namespace, self._name, error)
            is_ours = False
        self._beat()
        if is_ours:
            # Measured from before the call: others cannot have seen the renewal earlier.
            self._until = began + self._times.renew_deadline
        return is_ours

    async def _take(self) -> bool:
        found = await self._port.read(LEASES, self._namespace, self._name)
        lease = Lease() if found is None else Lease.read(found)
        if lease != self._seen:
            self._seen, self._seen_at = lease, self._clock()
        if lease.holder not in ("", self._identity):
            # Another replica has taken it.
            self._until = float("-inf")
            if self._clock() < self._seen_at + lease.duration:
                return False
        mine = lease.taken_by(self._identity, self._times.duration, datetime.now(UTC))
        is_taken = await self._write(found, mine)
        if is_taken:
            self._seen, self._seen_at = mine, self._clock()
        return is_taken

    async def _write(self, found: Any, lease: Lease) -> bool:
        if found is None:
            metadata = {"namespace": self._namespace, "name": self._name}
            manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            return await self._port.create(LEASES, {**manifest, "spec": lease.to_spec()})
        return await self._port.replace(LEASES, {**found, "spec": {**found.get("spec", {}), **lease.to_spec()}})

    async def _release(self) -> None:
        """Release the Lease if this replica still leads, so that a standby can lead at once."""
        if not self.leads:
            return
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(self._until - self._clock()):
                found = await self._port.read(LEASES, self._namespace, self._name)
                if found is not None and Lease.read(found).holder == self._identity:
                    await self._write(found, Lease.read(found).released(datetime.now(UTC)))
                    logger.info("released the Lease")
        self._until = float("-inf")


async def _ended(working: asyncio.Task[None]) -> None:
    """Wait for the end of the work; cancel it if it still runs after the Lease was lost."""
    if working.done():
        working.result()
        return
    working.cancel()
    done, _ = await asyncio.wait({working}, timeout=_END_SECONDS)
    if not done:
        raise RuntimeError(f"the leader's work did not end within {_END_SECONDS:g} s after the Lease was lost")
    if not working.cancelled():
        working.result()


async def _wait(event: asyncio.Event, limit: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            await event.wait()
