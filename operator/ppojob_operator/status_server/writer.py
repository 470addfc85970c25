"""Writes reports into the status: for each job at most once in an interval, the newest report, and none is lost.

With more jobs the interval is longer, because each write costs the API server time. The trainers get it in the replies.

    intake ──keep()──▶ kept reports ──dispatcher (when due)──▶ queue ──workers──▶ API server
                            ▲                                            │
                            └──────── not written: due again ────────────┘

The dispatcher waits for the next report that is due or for a new one; the workers wait for the queue. A report is
kept until it is written, so a cancelled or failed write loses nothing; `flush` writes the remaining ones at the end.

Each replica of the operator has its own writer, and the reports of one job arrive at any of them. So what is written
is computed at the write, from the current object: a report that was kept here never overwrites a newer one that
another replica wrote meanwhile.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from ppojob_api.v1alpha1.progress import MAX_REPORT_INTERVAL_SECONDS
from ppojob_operator import logs
from ppojob_operator.api_server import ApiRefused, ApiUnavailable, StatusOf
from ppojob_operator.status_server.fields import NO_REPORT, Order
from ppojob_operator.status_server.metrics import OperatorMetrics
from ppojob_operator.status_server.ports import JobIdentity, ProgressPort

_LOG = logging.getLogger(__name__)
_WORKERS = 8
_WRITES_PER_SECOND = 30.0
"""About 0.7 cores of the API server, at 23 ms a write."""
_LONGEST_SLEEP = 5.0
_SHORTEST_SLEEP = 0.05
"""A pass looks at all jobs: a burst of reports must not make it spin."""
_LAST_REPORT_RETRY = 1.0
_MAX_REFUSALS = 5
"""Refusals of the same job in a row after which its report is dropped. An unavailable API server does not count."""


@dataclass
class _Job:
    """What is known of one job's writes. Times are of the monotonic clock."""

    status_of: StatusOf | None = None
    order: Order = NO_REPORT
    received: float = 0.0
    is_last: bool = False
    due: float = 0.0
    last_try: float = float("-inf")
    refusals: int = 0
    is_queued: bool = False
    written: asyncio.Event = field(default_factory=asyncio.Event)


class ProgressWriter:
    """Keeps the newest report of each job and writes it when its time has come."""

    def __init__(
        self,
        port: ProgressPort,
        metrics: OperatorMetrics,
        *,
        interval_seconds: float,
        clock: Callable[[], float] = monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._port = port
        self._metrics = metrics
        self._interval = interval_seconds
        self._clock = clock
        self._beat = beat
        self._jobs: dict[JobIdentity, _Job] = {}
        self._queue: asyncio.Queue[JobIdentity] = asyncio.Queue()
        self._changed = asyncio.Event()

    @property
    def interval(self) -> float:
        """Seconds between two writes of a job, by the number of jobs that report."""
        wanted = min(len(self._jobs) / _WRITES_PER_SECOND, MAX_REPORT_INTERVAL_SECONDS)
        return max(self._interval, wanted)

    def newest(self, key: JobIdentity) -> Order:
        """Return the place of the newest report of the job that came here lately."""
        job = self._jobs.get(key)
        return NO_REPORT if job is None else job.order

    def keep(self, key: JobIdentity, status_of: StatusOf, *, order: Order = NO_REPORT, is_last: bool = False) -> None:
        """Take a report; the previous one of the same job is replaced if it is not written yet.

        Args:
            key: the job.
            status_of: gives the whole part of the status that the reports own, when it is written.
            order: place of the report among those of the job.
            is_last: write it at once.
        """
        job = self._jobs.setdefault(key, _Job())
        now = self._clock()
        job.status_of, job.received, job.is_last = status_of, now, is_last
        job.order = max(job.order, order)
        job.due = now if is_last else max(now, job.last_try + self.interval)
        job.written.clear()
        self._changed.set()

    async def written(self, key: JobIdentity, seconds: float) -> bool:
        """Wait until all that is kept of the job is written; False if that takes longer."""
        job = self._jobs.get(key)
        if job is None:
            return True
        try:
            async with asyncio.timeout(seconds):
                await job.written.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._dispatch(), name="progress dispatcher")
            for number in range(_WORKERS):
                group.create_task(self._work(), name=f"progress writer {number}")

    async def flush(self, seconds: float) -> int:
        """Write everything that is kept, after `run` was cancelled; return how many reports could not be written."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._write_all()
        left = self._waiting()
        if left:
            _LOG.warning("the last reports of %d jobs are not written: %s", len(left), ", ".join(map(str, left[:20])))
        return len(left)

    async def _write_all(self) -> None:
        while waiting := self._waiting():
            await asyncio.gather(*map(self._write, waiting))
            if self._waiting():
                await asyncio.sleep(_LAST_REPORT_RETRY)

    def _waiting(self) -> list[JobIdentity]:
        return [key for key, job in self._jobs.items() if job.status_of is not None]

    async def _dispatch(self) -> None:
        while True:
            self._changed.clear()
            self._beat()
            now = self._clock()
            for key, job in self._jobs.items():
                if job.status_of is not None and not job.is_queued and job.due <= now:
                    job.is_queued = True
                    self._queue.put_nowait(key)
            self._forget(now)
            await self._sleep()

    async def _sleep(self) -> None:
        waiting = [job.due for job in self._jobs.values() if job.status_of is not None and not job.is_queued]
        seconds = min([due - self._clock() for due in waiting] + [_LONGEST_SLEEP])
        await asyncio.sleep(_SHORTEST_SLEEP)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds - _SHORTEST_SLEEP, 0)):
                await self._changed.wait()

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            with logs.about(key):
                await self._write(key)

    async def _write(self, key: JobIdentity) -> None:
        job = self._jobs[key]
        status_of, received = job.status_of, job.received
        if status_of is None:
            return
        job.last_try = self._clock()
        try:
            exists = await self._port.apply_progress(key, status_of)
        except ApiUnavailable as error:
            self._postpone(key, job, error)
        except ApiRefused as error:
            job.refusals += 1
            self._postpone(key, job, error)
        else:
            self._done(job, status_of, exists=exists)
            self._metrics.status_write_lag.observe(self._clock() - received)
        finally:
            job.is_queued = False
            self._changed.set()

    def _done(self, job: _Job, status_of: StatusOf, *, exists: bool) -> None:
        self._metrics.status_writes.labels(outcome="written" if exists else "job_gone").inc()
        job.refusals = 0
        if job.status_of is status_of or not exists:
            job.status_of = None
            job.written.set()
        elif not job.is_last:  # A younger report came while this one was being written.
            job.due = job.last_try + self.interval

    def _postpone(self, key: JobIdentity, job: _Job, error: Exception) -> None:
        self._metrics.status_writes.labels(outcome="failed").inc()
        if job.refusals < _MAX_REFUSALS:
            wait = _LAST_REPORT_RETRY if job.is_last else self.interval
            job.due = self._clock() + wait
            _LOG.warning("the progress of %s is not written yet, next try in %g s: %s", key, wait, error)
            return
        _LOG.error("the progress of %s is dropped, the API server refused it %d times: %s", key, job.refusals, error)
        job.status_of, job.refusals = None, 0

    def _forget(self, now: float) -> None:
        """Drop jobs that have nothing to write and may be written at once: their memory holds nothing."""
        idle = [
            key for key, job in self._jobs.items()
            if job.status_of is None and not job.is_queued and job.last_try + self.interval <= now
        ]  # fmt: skip
        for key in idle:
            del self._jobs[key]
