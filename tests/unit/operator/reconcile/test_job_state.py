"""What the metrics say of a job: read from its status, whatever phase it is in."""

from datetime import UTC, datetime
from typing import Any

import pytest

from ppojob_operator.reading import read_job
from ppojob_operator.reconcile import JobState, job_state
from tests.unit.operator.reconcile.worlds import spec


def at(minute: int) -> str:
    return f"2026-03-01T12:{minute:02}:00Z"


def seconds(minute: int) -> float:
    return datetime(2026, 3, 1, 12, minute, tzinfo=UTC).timestamp()


def condition(kind: str, status: str, minute: int) -> dict[str, Any]:
    return {
        "type": kind, "status": status, "reason": "R", "message": "", "lastTransitionTime": at(minute),
        "observedGeneration": 1,
    }  # fmt: skip


PROGRESS = {
    "step": 25, "totalSteps": 100, "percentage": 25, "etaSeconds": 900,
    "lastUpdateTime": at(30), "lastChangeTime": at(28),
}  # fmt: skip
POOLS = [
    {"name": "actor", "desiredNodes": 2, "readyNodes": 1, "gpus": 4},
    {"name": "critic", "desiredNodes": 1, "readyNodes": 1, "gpus": 1},
]
FAILURE = {"attempt": 0, "reason": "OutOfMemory", "message": "", "time": at(40)}


def state_of(status: dict[str, Any], written: dict[str, Any] | None = None, **changes: Any) -> JobState:
    metadata = {"namespace": "ns", "name": "job", "uid": "u", "generation": 1}
    return job_state(read_job({"metadata": metadata, "spec": spec(**changes), "status": status}), written)


def running(**changes: Any) -> dict[str, Any]:
    return {"phase": "Running", "startTime": at(1), "progress": PROGRESS, "pools": POOLS, **changes}


def test_a_running_job_has_progress_time_left_gpus_and_what_is_not_saved() -> None:
    state = state_of(running(retries={"user": 1, "infrastructure": 2, "ignored": 3, "total": 6}))

    assert state == JobState(
        phase="Running",
        progress_ratio=0.25,
        seconds_left=900,
        retries={"user": 1, "infrastructure": 2, "ignored": 3},
        gpus={"desired": 5, "ready": 3},
        last_progress=seconds(28),
        last_report=seconds(30),
        unsaved_since=seconds(1),
    )


@pytest.mark.parametrize(
    ("status", "since"),
    [
        ({}, seconds(1)),
        ({"checkpoint": {"step": 20, "path": "/data/c", "time": at(20)}}, seconds(20)),
        ({"checkpoint": {"step": 20, "path": "/data/c", "time": at(20)}, "startTime": at(25)}, seconds(25)),
    ],
    ids=["no checkpoint yet", "a checkpoint", "resumed after the checkpoint"],
)
def test_work_is_unsaved_since_the_newest_checkpoint_or_the_last_start(status: dict[str, Any], since: float) -> None:
    assert state_of(running(**status)).unsaved_since == since


def test_a_job_without_checkpoints_has_no_age_of_a_checkpoint() -> None:
    assert state_of(running(), checkpoint={"everySteps": 0}).unsaved_since is None


@pytest.mark.parametrize(
    ("phase", "conditions", "since"),
    [
        ("", [], None),
        ("Pending", [condition("Accepted", "False", 3)], seconds(3)),
        ("Starting", [condition("Accepted", "True", 3), condition("Submitted", "False", 4)], seconds(4)),
        ("Queued", [condition("Submitted", "False", 4), condition("Suspended", "False", 9)], seconds(9)),
        ("Restarting", [condition("Submitted", "False", 12)], seconds(12)),
        ("Running", [condition("Submitted", "True", 12)], None),
        ("Suspended", [condition("Submitted", "False", 12)], None),
        ("Failed", [condition("Submitted", "False", 12)], None),
    ],
)
def test_a_job_waits_until_its_trainer_starts(
    phase: str, conditions: list[dict[str, Any]], since: float | None
) -> None:
    assert state_of({"phase": phase, "conditions": conditions} if phase else {}).waiting_since == since


def test_a_stall_is_said_until_the_job_has_finished() -> None:
    stalled = {"conditions": [condition("Stalled", "True", 30)]}

    assert state_of(running(**stalled)).is_stalled
    assert not state_of(running(**stalled, phase="Failed", completionTime=at(50))).is_stalled


def test_a_failed_job_has_its_end_and_its_reason_and_no_gpus() -> None:
    state = state_of(running(phase="Failed", completionTime=at(41), lastFailure=FAILURE))

    assert (state.ended_at, state.last_failure) == (seconds(41), ("OutOfMemory", seconds(40)))
    assert (state.gpus, state.seconds_left, state.last_report) == ({}, None, None)


def test_what_the_pass_has_written_replaces_what_was_read() -> None:
    state = state_of(running(), {"phase": "Restarting", "lastFailure": FAILURE, "pools": POOLS[:1]})

    assert (state.phase, state.gpus) == ("Restarting", {"desired": 4, "ready": 2})
    assert state.last_failure == ("OutOfMemory", seconds(40))
    assert state.progress_ratio == 0.25


def test_a_download_is_no_wait_and_a_wait_begins_after_it() -> None:
    conditions = [condition("Accepted", "True", 0), condition("SourcesFetched", "False", 1)]
    assert state_of({"phase": "Fetching", "conditions": conditions}).waiting_since is None

    conditions = [
        condition("Accepted", "True", 0),
        condition("SourcesFetched", "True", 50),
        condition("Submitted", "False", 1),
    ]
    assert state_of({"phase": "Starting", "conditions": conditions}).waiting_since == seconds(50)
