"""How many requests are in work at the same time, and how often a job may report. Pure, except for the clock.

`endpoint.py` asks it after a request's token was checked, so only senders of the job's own namespace are counted.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from ppojob_operator.status_server import refusals
from ppojob_operator.status_server.limits.rates import Rates
from ppojob_operator.status_server.ports import JobIdentity

_TOTAL = "all"


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests whose token is good."""

    total: int = 256
    """Requests in work at the same time."""
    per_namespace: int = 128
    """Requests of one namespace in work at the same time: it leaves room for the others."""
    per_job: int = 4
    """Requests of one job in work at the same time; a trainer sends one after the other."""
    per_second: float = 2.0
    """Reports of one job in a second, in the long run; a trainer sends one in ten seconds, and more when it retries."""
    burst: int = 20
    """Reports of one job at once."""


class JobRequests:
    """The requests in work."""

    def __init__(self, limits: RequestLimits, clock: Callable[[], float] = monotonic) -> None:
        self._limits = limits
        self._rates = Rates(limits.per_second, limits.burst, clock)
        self._running: Counter[Hashable] = Counter()

    @contextmanager
    def running(self, key: JobIdentity) -> Iterator[None]:
        """Count a request of the job while the block runs.

        Raises:
            Refusal: there are too many, of the job, of its namespace or in all.
        """
        limits = self._limits
        bounds = ((key, limits.per_job), (key.namespace, limits.per_namespace), (_TOTAL, limits.total))
        for counted, limit in bounds:
            if self._running[counted] >= limit:
                raise self._too_many(key, counted, limit)
        if not self._rates.take(key):
            raise refusals.too_many_requests(
                f"{key} sent more than {limits.per_second:g} reports per second: send one every ten seconds"
            )
        self._running.update(counted for counted, _ in bounds)
        try:
            yield
        finally:
            self._running.subtract(counted for counted, _ in bounds)
            self._running = +self._running

    @staticmethod
    def _too_many(key: JobIdentity, counted: Hashable, limit: int) -> refusals.Refusal:
        if counted == _TOTAL:
            return refusals.unavailable("the operator is busy")
        of = f"job {key}" if counted == key else f"namespace {key.namespace}"
        return refusals.too_many_requests(f"{limit} requests of {of} are in progress: wait for their answers")
