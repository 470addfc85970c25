"""The series of single jobs: what they say, and that their number has limits."""

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from ppojob_operator.plan import JobKey
from ppojob_operator.reconcile import JobState
from ppojob_operator.status_server import job_metrics
from ppojob_operator.status_server.job_metrics import SHOWN_AFTER_END_S, JobMetrics

NOW = 2e9
KEY = JobKey("team-a", "sums")
SUMS = {"namespace": "team-a", "ppojob": "sums"}


def registry_of(states: Mapping[JobKey, JobState] | None) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(JobMetrics(lambda: states, clock=lambda: NOW))
    return registry


def names_of_jobs(registry: CollectorRegistry) -> list[str]:
    """Return the jobs that have series."""
    samples = [sample for family in registry.collect() for sample in family.samples]
    return sorted({sample.labels["ppojob"] for sample in samples if "ppojob" in sample.labels})


@pytest.mark.parametrize(
    ("state", "name", "labels", "value"),
    [
        (JobState("Running"), "ppojob_job_phase", {"phase": "Running"}, 1),
        (JobState("Running"), "ppojob_job_phase", {"phase": "Failed"}, None),
        (JobState("Running", progress_ratio=0.25), "ppojob_job_progress_ratio", {}, 0.25),
        (JobState("Running", seconds_left=0.0), "ppojob_job_eta_seconds", {}, 0),
        (JobState("Starting"), "ppojob_job_eta_seconds", {}, None),
        (JobState("Running", retries={"user": 2}), "ppojob_job_retries_total", {"cause": "user"}, 2),
        (JobState("Running", gpus={"ready": 3.0}), "ppojob_job_gpus", {"state": "ready"}, 3),
        (JobState("Failed", gpu_seconds={"idle": 4.0}), "ppojob_job_gpu_seconds_total", {"state": "idle"}, 4),
        (JobState("Queued", waiting_since=5.0), "ppojob_job_waiting_since_timestamp_seconds", {}, 5),
        (JobState("Running", last_progress=6.0), "ppojob_job_last_progress_timestamp_seconds", {}, 6),
        (JobState("Running", last_report=7.0), "ppojob_job_last_report_timestamp_seconds", {}, 7),
        (JobState("Running", is_stalled=True), "ppojob_job_stalled", {}, 1),
        (JobState("Running"), "ppojob_job_stalled", {}, 0),
        (JobState("Succeeded", ended_at=NOW), "ppojob_job_stalled", {}, None),
        (JobState("Running", unsaved_since=8.0), "ppojob_job_unsaved_since_timestamp_seconds", {}, 8),
        (
            JobState("Failed", ended_at=NOW, last_failure=("OutOfMemory", 9.0)),
            "ppojob_job_last_failure_timestamp_seconds",
            {"reason": "OutOfMemory"},
            9,
        ),
    ],
)
def test_a_job_is_shown_as_it_is(state: JobState, name: str, labels: dict[str, str], value: float | None) -> None:
    assert registry_of({KEY: state}).get_sample_value(name, SUMS | labels) == value


def test_every_phase_is_counted_by_the_leader_alone() -> None:
    leader, standby = registry_of({KEY: JobState("Running")}), registry_of(None)

    assert leader.get_sample_value("ppojob_jobs", {"phase": "Running"}) == 1
    assert leader.get_sample_value("ppojob_jobs", {"phase": "Failed"}) == 0
    assert standby.get_sample_value("ppojob_jobs", {"phase": "Running"}) is None


def test_a_finished_job_is_shown_for_a_day_and_counted_for_ever() -> None:
    ends = {"fresh": NOW - SHOWN_AFTER_END_S + 1, "old": NOW - SHOWN_AFTER_END_S - 1}
    registry = registry_of({JobKey("ns", name): JobState("Failed", ended_at=end) for name, end in ends.items()})

    assert names_of_jobs(registry) == ["fresh"]
    assert registry.get_sample_value("ppojob_jobs", {"phase": "Failed"}) == 2
    assert registry.get_sample_value("ppojob_jobs_without_series") == 0


def test_at_most_so_many_jobs_have_series_and_those_that_have_not_finished_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_metrics, "MAX_JOBS", 2)
    states = {
        JobKey("ns", "ended-before"): JobState("Failed", ended_at=NOW - 20),
        JobKey("ns", "ended-now"): JobState("Failed", ended_at=NOW - 10),
        JobKey("ns", "runs"): JobState("Running"),
    }

    registry = registry_of(states)

    assert names_of_jobs(registry) == ["ended-now", "runs"]
    assert registry.get_sample_value("ppojob_jobs_without_series") == 1
