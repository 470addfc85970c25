"""Who leads: takes the Lease, renews it, and ends the leader's work at once when it is lost.

      stand by ──Lease free, or not renewed for its duration──▶ lead: the term's work runs, renewed every retry period
         ▲                                                        │
         └── not renewed for the renew deadline, or another's ────┘   the work is cancelled, `check` raises from then on

The rules are client-go's `leaderelection`: a watcher waits for the duration by its own clock, from when it saw the last
change, so that clocks may differ; the leader gives up at the renew deadline, which is shorter, so that two never lead
at the same time. `check` compares the time itself: a process that was frozen finds that it leads no longer before it
has done anything. `main.py` runs it; it knows nothing of what the leader does.
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
"""What the leader does until the event is set; that it ends earlier is an error of its own."""

_JITTER = 1.2
_END_SECONDS = 30.0


@dataclass(frozen=True)
class ElectionTimes:
    """client-go's three times, in seconds."""

    duration: float = 15.0
    """How long others wait after the last renewal that they saw."""
    renew_deadline: float = 10.0
    """How long the leader leads after its last renewal; shorter than `duration`."""
    retry_period: float = 2.0
    """Time between two tries."""


class Election:
    """One replica's part in the election."""

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
        """Take part in the election.

        Args:
            port: the API server.
            place: namespace and name of the Lease.
            identity: name of this replica; no two processes may ever have the same.
            times: the three times.
            beat: called after each try.
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
        """Who holds the Lease, as far as is known; None: not asked yet, empty: nobody."""
        return None if self._seen is None else self._seen.holder

    def check(self) -> None:
        """Return if this replica leads.

        Raises:
            ApiUnavailable: it does not; nothing may be written.
        """
        if not self.leads:
            raise ApiUnavailable(f"replica {self._identity} does not lead (any more): it writes nothing")

    async def run(self, stop: asyncio.Event, work: Work) -> None:
        """Stand by and lead in turn until `stop` is set, and give the Lease back at the end.

        Raises:
            RuntimeError: the work did not end in time after the Lease was lost.
            Exception: whatever the work raises.
        """
        while await self._acquire(stop):
            await self._lead(stop, work)

    async def _acquire(self, stop: asyncio.Event) -> bool:
        """Wait until this replica leads; False if `stop` came first."""
        told = None
        while not stop.is_set():
            if await self._try():
                return True
            # Where the Lease cannot be read, this one may be the last holder that it knows of.
            others = self.leader if self.leader != self._identity else ""
            if others != told:
                told = others
                logger.info("standing by: %s leads", told or "nobody that is known")
            await _wait(stop, self._times.retry_period * random.uniform(1.0, _JITTER))
        return False

    async def _lead(self, stop: asyncio.Event, work: Work) -> None:
        """Do the leader's work until `stop` is set or the Lease is lost."""
        logger.info("leading as %s", self._identity)
        over = asyncio.Event()
        working = asyncio.create_task(work(over), name="the leader's work")
        renewing = asyncio.create_task(self._renew(), name="renewal of the Lease")
        stopping = asyncio.create_task(stop.wait(), name="stop of the election")
        try:
            await asyncio.wait({working, renewing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            over.set()
            # Asked to stop: it leads until the looks in work are done.
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
        logger.warning("the Lease %s/%s is lost: this replica stops deciding", self._namespace, self._name)

    async def _try(self) -> bool:
        """Take or renew the Lease; return whether that succeeded."""
        began = self._clock()
        # One call that hangs must leave time for another one.
        limit = self._times.renew_deadline / 2
        try:
            async with asyncio.timeout(min(limit, self._until - began) if self.leads else limit):
                is_ours = await self._take()
        except TimeoutError:
            logger.warning("the Lease %s/%s: no answer in time", self._namespace, self._name)
            is_ours = False
        except ApiError as error:
            logger.warning("the Lease %s/%s: %s", self._namespace, self._name, error)
            is_ours = False
        self._beat()
        if is_ours:
            # From before the call: others saw the renewal no earlier.
            self._until = began + self._times.renew_deadline
        return is_ours

    async def _take(self) -> bool:
        found = await self._port.read(LEASES, self._namespace, self._name)
        lease = Lease() if found is None else Lease.read(found)
        if lease != self._seen:
            self._seen, self._seen_at = lease, self._clock()
        if lease.holder not in ("", self._identity):
            # Another one took it, however late this one learns of it.
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
            made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            return await self._port.create(LEASES, {**made, "spec": lease.to_spec()})
        return await self._port.replace(LEASES, {**found, "spec": {**found.get("spec", {}), **lease.to_spec()}})

    async def _release(self) -> None:
        """Let the next one lead at once, where this one still does."""
        if not self.leads:
            return
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(self._until - self._clock()):
                found = await self._port.read(LEASES, self._namespace, self._name)
                if found is not None and Lease.read(found).holder == self._identity:
                    await self._write(found, Lease.read(found).released(datetime.now(UTC)))
                    logger.info("gave the Lease back")
        self._until = float("-inf")


async def _ended(working: asyncio.Task[None]) -> None:
    """Return when the work ended; it is cancelled where it goes on although the Lease is lost."""
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
