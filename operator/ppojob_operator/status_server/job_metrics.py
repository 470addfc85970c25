"""The metrics of single jobs, computed at each scrape from what the loop knows, so that none can drift.

`metrics.py` registers it. Users choose the labels of jobs, so the number of series is limited: a finished job is
shown for a day, and at most `MAX_JOBS` jobs have series, unfinished jobs first.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ppojob_api.v1alpha1.constants import Phase
from ppojob_operator.plan import JobKey
from ppojob_operator.reconcile import JobState

MAX_JOBS = 1000
"""Maximum number of jobs that have series. Each job has about 15."""
SHOWN_AFTER_END_S = 86_400.0
"""How long a finished job is shown: long enough for alerts and for the person who reads them."""

PHASES = tuple(value for name, value in vars(Phase).items() if not name.startswith("_"))

JobStates = Callable[[], Mapping[JobKey, JobState] | None]
"""Returns the jobs that this operator runs; None on a replica that does not lead, so that a sum counts once."""

_GAUGES: dict[str, tuple[str, Callable[[JobState], float | None]]] = {
    "ppojob_job_progress_ratio": ("Share of the job's steps that are done.", lambda job: job.progress_ratio),
    "ppojob_job_eta_seconds": ("Estimated time to the end of a running job.", lambda job: job.seconds_left),
    "ppojob_job_waiting_since_timestamp_seconds": (
        "Time from which a job has waited for its trainer to start.",
        lambda job: job.waiting_since,
    ),
    "ppojob_job_last_progress_timestamp_seconds": (
        "Time of the last report of a running job that showed a change.",
        lambda job: job.last_progress,
    ),
    "ppojob_job_last_report_timestamp_seconds": (
        "Time of the last report of a running job.",
        lambda job: job.last_report,
    ),
    "ppojob_job_stalled": (
        "1 if a job has made no progress for longer than its limit allows, else 0.",
        lambda job: None if job.ended_at is not None else float(job.is_stalled),
    ),
    "ppojob_job_unsaved_since_timestamp_seconds": (
        "Time from which the work of a running job is in no checkpoint.",
        lambda job: job.unsaved_since,
    ),
}


class JobMetrics:
    """The collector; `states` may be exchanged."""

    def __init__(self, states: JobStates, clock: Callable[[], float] = time.time) -> None:
        self.states = states
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the number of jobs in each phase, then the jobs."""
        states = self.states()
        yield _by_phase(states)
        shown, num_left_out = self._shown(states or {})
        yield GaugeMetricFamily(
            "ppojob_jobs_without_series", f"Jobs beyond the first {MAX_JOBS}, which have no series.", num_left_out
        )
        yield _labelled("ppojob_job_phase", "1 for the phase that a job is in.", "phase", shown, _phase)
        yield _labelled("ppojob_job_gpus", "GPUs of a job's pools, by state.", "state", shown, lambda job: job.gpus)
        yield _labelled(
            "ppojob_job_last_failure_timestamp_seconds", "Time of a job's last failed attempt, by reason.", "reason",
            shown, lambda job: dict([job.last_failure]) if job.last_failure else {},
        )  # fmt: skip
        yield _labelled(
            "ppojob_job_retries", "Attempts of a job that failed and were tried again, by cause.", "cause",
            shown, lambda job: job.retries, CounterMetricFamily,
        )  # fmt: skip
        yield _labelled(
            "ppojob_job_gpu_seconds", "GPU time that a job has held, by state: busy or idle.", "state",
            shown, lambda job: job.gpu_seconds, CounterMetricFamily,
        )  # fmt: skip
        for name, (words, value_of) in _GAUGES.items():
            yield _gauge(name, words, shown, value_of)

    def _shown(self, states: Mapping[JobKey, JobState]) -> tuple[dict[JobKey, JobState], int]:
        """Return the jobs that have series, and how many should and do not."""
        oldest_end = self._clock() - SHOWN_AFTER_END_S
        recent = [(key, job) for key, job in states.items() if job.ended_at is None or job.ended_at > oldest_end]
        recent.sort(key=lambda item: (item[1].ended_at is not None, -(item[1].ended_at or 0.0), item[0]))
        return dict(recent[:MAX_JOBS]), max(len(recent) - MAX_JOBS, 0)


def _by_phase(states: Mapping[JobKey, JobState] | None) -> Metric:
    family = GaugeMetricFamily("ppojob_jobs", "PPOJobs by phase.", labels=["phase"])
    if states is not None:
        found = [job.phase for job in states.values()]
        for phase in PHASES:
            family.add_metric([phase], found.count(phase))
    return family


def _phase(job: JobState) -> dict[str, float]:
    return {job.phase: 1.0} if job.phase else {}


def _labelled(
    name: str,
    words: str,
    label: str,
    jobs: Mapping[JobKey, JobState],
    values_of: Callable[[JobState], Mapping[str, float]],
    make: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    family = make(name, words, labels=["namespace", "ppojob", label])
    for key, job in jobs.items():
        for value, number in values_of(job).items():
            family.add_metric([key.namespace, key.name, value], number)
    return family


def _gauge(
    name: str, words: str, jobs: Mapping[JobKey, JobState], value_of: Callable[[JobState], float | None]
) -> Metric:
    family = GaugeMetricFamily(name, words, labels=["namespace", "ppojob"])
    for key, job in jobs.items():
        if (value := value_of(job)) is not None:
            family.add_metric([key.namespace, key.name], value)
    return family
