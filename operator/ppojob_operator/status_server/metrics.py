"""The operator's Prometheus metrics, on a registry of their own.

`main.py` makes one and hands small parts of it to the loop; the probes' server shows it at /metrics. No label carries
a name that a user chooses: a thousand jobs make no more series than one.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _JobsByPhase:
    """Counts the jobs at each scrape, so that no count can drift."""

    def __init__(self, jobs_by_phase: Callable[[], Mapping[str, int]]) -> None:
        self.jobs_by_phase = jobs_by_phase

    def collect(self) -> Iterable[Metric]:
        """Return one gauge with a sample for each phase."""
        family = GaugeMetricFamily("ppojob_jobs", "PPOJobs by phase.", labels=["phase"])
        for phase, count in sorted(self.jobs_by_phase().items()):
            family.add_metric([phase], count)
        return [family]


class OperatorMetrics:
    """What the operator counts."""

    def __init__(self, jobs_by_phase: Callable[[], Mapping[str, int]] = dict) -> None:
        self.registry = CollectorRegistry()
        self._phases = _JobsByPhase(jobs_by_phase)
        self.registry.register(self._phases)
        self.leads = Gauge("ppojob_leader", "1 on the replica that leads, 0 on the others.", registry=self.registry)
        self.reconciles = Histogram(
            "ppojob_reconcile_duration_seconds",
            "Time of one pass over one job, by outcome.",
            ["outcome"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_depth = Gauge("ppojob_queue_depth", "Jobs that wait for a pass.", registry=self.registry)
        self.left_alone = Gauge(
            "ppojob_jobs_left_alone", "PPOJobs that are seen here and run by another operator.", registry=self.registry
        )
        self.submissions = Counter("ppojob_submissions", "Attempts that Ray was given.", registry=self.registry)
        self.retries = Counter(
            "ppojob_retries", "Attempts that failed and are tried again, by whose failure it was.", ["cause"],
            registry=self.registry,
        )  # fmt: skip
        for cause in ("user", "infrastructure"):
            self.retries.labels(cause=cause)
        self.reports = Counter(
            "ppojob_progress_reports", "Progress reports by outcome: Accepted, or why not.", ["outcome"],
            registry=self.registry,
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

    def ask(
        self,
        *,
        jobs_by_phase: Callable[[], Mapping[str, int]],
        queue_depth: Callable[[], int],
        left_alone: Callable[[], int],
        leads: Callable[[], bool],
    ) -> None:
        """Ask these at each scrape."""
        self._phases.jobs_by_phase = jobs_by_phase
        self.queue_depth.set_function(queue_depth)
        self.left_alone.set_function(left_alone)
        self.leads.set_function(leads)

    def count_submission(self) -> None:
        """Count one attempt that Ray was given."""
        self.submissions.inc()

    def count_retries(self, cause: str, count: int) -> None:
        """Count attempts that are tried again; `cause` is `user` or `infrastructure`."""
        self.retries.labels(cause=cause).inc(count)

    def count_review(self, outcome: str) -> None:
        """Count one answer of the admission webhook: Allowed, Warned, Refused or Malformed."""
        self.reviews.labels(outcome=outcome).inc()

    def observe_reconcile(self, seconds: float, outcome: str) -> None:
        """Count one pass over one job."""
        self.reconciles.labels(outcome=outcome).observe(seconds)
