"""The operator's Prometheus metrics, in a separate registry.

`main.py` makes one and hands small parts of it to the loop; the probes' server shows it at /metrics. The only labels
with names that users choose are those of `job_metrics.py`, which limits their number.
"""

import time
from collections.abc import Callable, Iterable
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ppojob_operator.status_server.job_metrics import JobMetrics, JobStates

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OperatorMetrics:
    """What the operator counts."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._jobs = JobMetrics(lambda: None, clock)
        self.registry.register(self._jobs)
        self.leads = Gauge("ppojob_leader", "1 on the replica that leads, 0 on the others.", registry=self.registry)
        self.reconciles = Histogram(
            "ppojob_reconcile_duration_seconds",
            "Time of one reconcile of one job, by outcome.",
            ["outcome"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_depth = Gauge("ppojob_queue_depth", "Jobs that wait to be reconciled.", registry=self.registry)
        self.left_alone = Gauge(
            "ppojob_jobs_left_alone",
            "PPOJobs in the watched namespaces that another operator runs.",
            registry=self.registry,
        )
        self.watch_failures = Counter(
            "ppojob_watch_failures", "Failures of the watches, which are then restarted.", registry=self.registry
        )
        self.api_requests = Counter(
            "ppojob_api_requests", "Requests to the API server; code is the HTTP status, or error without an answer.",
            ["method", "resource", "code"], registry=self.registry,
        )  # fmt: skip
        self.submissions = Counter("ppojob_submissions", "Attempts submitted to Ray.", registry=self.registry)
        self.retries = Counter(
            "ppojob_retries", "Attempts that failed and are tried again, by cause.", ["cause"],
            registry=self.registry,
        )  # fmt: skip
        for cause in ("user", "infrastructure", "ignored"):
            self.retries.labels(cause=cause)
        self.reports = Counter(
            "ppojob_progress_reports", "Progress reports by outcome: Accepted, or why not.", ["outcome"],
            registry=self.registry,
        )  # fmt: skip
        self.closed_connections = Counter(
            "ppojob_closed_connections", "Connections that the operator closed because of a limit, by reason.",
            ["reason"], registry=self.registry,
        )  # fmt: skip
        self.status_writes = Counter(
            "ppojob_progress_status_writes", "Status writes of reports by outcome.", ["outcome"], registry=self.registry
        )
        self.status_write_lag = Histogram(
            "ppojob_progress_status_write_lag_seconds",
            "Time from a report's arrival to its status write.",
            buckets=_SECONDS,
            registry=self.registry,
        )

        self.reviews = Counter(
            "ppojob_admission_reviews", "Answers of the admission webhook by outcome.", ["outcome"],
            registry=self.registry,
        )  # fmt: skip

        self.notifications = Counter(
            "ppojob_notifications", "Notifications about jobs by type and result; retried: a try that is repeated.",
            ["type", "result"], registry=self.registry,
        )  # fmt: skip

    def ask(
        self,
        *,
        job_states: JobStates,
        queue_depth: Callable[[], int],
        left_alone: Callable[[], int],
        leads: Callable[[], bool],
    ) -> None:
        """Call these at each scrape."""
        self._jobs.states = job_states
        self.queue_depth.set_function(queue_depth)
        self.left_alone.set_function(left_alone)
        self.leads.set_function(leads)

    def count_watch_failure(self) -> None:
        """Count one failure of the watches."""
        self.watch_failures.inc()

    def count_api_request(self, method: str, resource: str, code: str) -> None:
        """Count one request to the API server."""
        self.api_requests.labels(method=method, resource=resource, code=code).inc()

    def count_submission(self) -> None:
        """Count one attempt that was submitted to Ray."""
        self.submissions.inc()

    def count_retries(self, cause: str, count: int) -> None:
        """Count attempts that are tried again; `cause` is `user`, `infrastructure` or `ignored`."""
        self.retries.labels(cause=cause).inc(count)

    def count_review(self, outcome: str) -> None:
        """Count one answer of the admission webhook: Allowed, Warned, Refused or Malformed."""
        self.reviews.labels(outcome=outcome).inc()

    def expect_notifications(self, kinds: Iterable[str], results: Iterable[str]) -> None:
        """Show zeros for these types and results. A counter that begins at 1 has no increase for Prometheus."""
        for kind, result in product(kinds, results):
            self.notifications.labels(type=kind, result=result)

    def count_notification(self, kind: str, result: str) -> None:
        """Count one notification, or one try that is repeated."""
        self.notifications.labels(type=kind, result=result).inc()

    def count_closed_connection(self, reason: str) -> None:
        """Count one connection that was closed: SourceLimit, SourceRate, TotalLimit or TooSlow."""
        self.closed_connections.labels(reason=reason).inc()

    def observe_reconcile(self, seconds: float, outcome: str) -> None:
        """Count one reconcile of one job."""
        self.reconciles.labels(outcome=outcome).observe(seconds)
