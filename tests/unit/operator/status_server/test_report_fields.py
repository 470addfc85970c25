"""The status that results from a report, and the reply to the trainer."""

import itertools
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import Command, ProgressReport
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_operator.reading import finished_condition
from ppojob_operator.status_server.fields import (
    format_number,
    format_time,
    progress_reply,
    progress_status,
)

ADVICE: dict[str, Any] = {
    "recommendation": "1 GPU would do",
    "layoutAdvice": [
        {"pools": [{"name": "actor", "nodes": 1, "gpusPerNode": 1}], "gpus": 1, "stepTimePercent": 3},
    ],
}
CHECKS: dict[str, Any] = {
    "step": 12,
    "oldestWeightsStep": 11,
    "maxStaleness": 0,
    "comparedWeightsStep": 11,
    "rolloutProbsDiffMean": "0.0003",
    "idleFraction": "0.04",
}
NOW = datetime(2026, 1, 31, 12, 5, 6, 999_999, tzinfo=UTC)


def status_of(report: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    status = progress_status(ProgressReport.model_validate(report), job, NOW)
    assert status is not None
    return status


def test_a_report_becomes_the_fields_of_its_field_manager_and_no_others(
    report: dict[str, Any], job: dict[str, Any]
) -> None:
    status = status_of({**report, "modelPath": "/data/model", "checks": CHECKS, **ADVICE}, job)

    assert status == {
        "progress": {
            "step": 12,
            "totalSteps": 120,
            "percentage": 10,
            "phases": 0,
            "etaSeconds": 640,
            "reward": "0.4123",
            "firstValidationReward": "0.2",
            "activity": "Training",
            "firstStepTime": "2026-01-31T12:00:00Z",
            "lastUpdateTime": "2026-01-31T12:05:06Z",
            "lastChangeTime": "2026-01-31T12:05:06Z",
            "attempt": 2,
            "report": 17,
        },
        "metrics": [{"name": "critic/score/mean", "value": "0.4123"}, {"name": "actor/lr", "value": "1e-06"}],
        "pools": [{"name": "actor", "busyFraction": "0.91"}],
        "checkpoint": report["checkpoint"],
        "model": {"path": "/data/model"},
        "checks": CHECKS,
        **ADVICE,
    }


def test_the_fields_are_those_of_the_contract(report: dict[str, Any], job: dict[str, Any]) -> None:
    PPOJobStatus.model_validate(status_of(report, job))


def test_a_new_attempt_that_knows_nothing_yet_wipes_nothing_but_where_it_stands(
    report: dict[str, Any], job: dict[str, Any]
) -> None:
    before = status_of({**report, "modelPath": "/data/model", "checks": CHECKS, **ADVICE}, job)
    job["status"] |= before | {
        "pools": [{"name": "actor", "desiredNodes": 1, "busyFraction": "0.91"}, {"name": "critic", "gpus": 1}]
    }

    after = status_of({"uid": "uid-1", "attempt": 3, "activity": "Loading", "totalSteps": 120}, job)

    assert after["progress"] == {
        "step": 0,
        "totalSteps": 120,
        "percentage": 0,
        "phases": 0,
        "reward": "0.4123",
        "firstValidationReward": "0.2",
        "activity": "Loading",
        "firstStepTime": "2026-01-31T12:00:00Z",
        "lastUpdateTime": "2026-01-31T12:05:06Z",
        "lastChangeTime": "2026-01-31T12:05:06Z",
        "attempt": 3,
        "report": 0,
    }
    assert "layoutAdvice" not in after, "it is of the layout before"
    assert "checks" not in after, "no step of this attempt was checked"
    replaced = ("progress", "layoutAdvice", "checks")
    kept = {name: value for name, value in before.items() if name not in replaced}
    assert {name: after[name] for name in kept} == kept


@pytest.mark.parametrize(
    ("changes", "time"),
    [
        ({}, "2026-01-31T12:05:06Z"),
        ({"number": 18, "totalSteps": 240, "etaSeconds": 1.0, "metrics": {"actor/lr": 2e-06}}, "2026-01-31T12:05:06Z"),
        ({"checkpoint": None}, "2026-01-31T12:05:06Z"),
        ({"attempt": 3}, "2026-01-31T12:35:06Z"),
        ({"step": 13}, "2026-01-31T12:35:06Z"),
        ({"phases": 1}, "2026-01-31T12:35:06Z"),
        ({"activity": "Saving"}, "2026-01-31T12:35:06Z"),
        ({"checkpoint": {"step": 12, "path": "/c", "time": "2026-01-31T12:30:00Z"}}, "2026-01-31T12:35:06Z"),
        ({"modelPath": "/data/model"}, "2026-01-31T12:35:06Z"),
        ({"modelPath": "/data/model", "modelAddress": "s3://bucket/model"}, "2026-01-31T12:35:06Z"),
    ],
)
def test_when_the_trainer_got_on_last_is_kept_over_reports_that_say_the_same(
    report: dict[str, Any], job: dict[str, Any], changes: dict[str, Any], time: str
) -> None:
    job["status"] |= status_of(report, job)

    later = progress_status(ProgressReport.model_validate({**report, **changes}), job, NOW + timedelta(minutes=30))

    assert later is not None
    assert later["progress"]["lastUpdateTime"] == "2026-01-31T12:35:06Z"
    assert later["progress"]["lastChangeTime"] == time


def test_a_layout_that_is_as_good_as_any_other_takes_the_recommendation_away(
    report: dict[str, Any], job: dict[str, Any]
) -> None:
    job["status"] |= status_of({**report, **ADVICE}, job)

    after = status_of({**report, "recommendation": "", "layoutAdvice": []}, job)

    assert not {"recommendation", "layoutAdvice"} & set(after)


@pytest.mark.parametrize(
    ("step", "total", "percentage"), [(0, 0, 0), (0, 8, 0), (1, 3, 33), (29, 100, 29), (8, 8, 100), (9, 8, 100)]
)
def test_the_percentage_is_rounded_down_and_never_beyond_100(
    report: dict[str, Any], job: dict[str, Any], step: int, total: int, percentage: int
) -> None:
    status = status_of({**report, "step": step, "totalSteps": total}, job)

    assert status["progress"]["percentage"] == percentage


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41, "0.41"),
        (0.412345, "0.4123"),
        (-0.00123456, "-0.001235"),
        (1e-6, "1e-06"),
        (1.0, "1"),
        (0.0, "0"),
        (-0.0, "0"),
        (128.25, "128.2"),
        (12345.6, "12346"),
        (44_000.0, "44000"),
        (1e20, "1e+20"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_times_are_in_utc() -> None:
    assert format_time(datetime(2026, 1, 31, 13, 0, tzinfo=timezone(timedelta(hours=1)))) == "2026-01-31T12:00:00Z"


def test_the_trainer_receives_what_may_change_while_it_runs(job: dict[str, Any]) -> None:
    assert progress_reply(job, 2).to_wire() == {
        "command": "None",
        "settings": {"totalSteps": 120, "validateEverySteps": 10, "checkpointEverySteps": 50, "checkpointKeep": 2},
    }


@pytest.mark.parametrize(
    ("trainer", "length"), [({"totalEpochs": 3}, {"totalEpochs": 3}), ({}, {"totalSteps": 100})], ids=["epochs", "none"]
)
def test_the_length_of_a_run_may_be_epochs_or_its_default(
    job: dict[str, Any], trainer: dict[str, int], length: dict[str, int]
) -> None:
    job["spec"]["trainer"] = trainer

    settings = progress_reply(job, 2).to_wire()["settings"]

    assert {name: value for name, value in settings.items() if name.startswith("total")} == length


def test_a_trainer_whose_job_is_being_deleted_is_asked_to_stop(job: dict[str, Any]) -> None:
    job["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"

    reply = progress_reply(job, 2)
    assert (reply.command, reply.is_deleted) == (Command.STOP, True)


def test_a_trainer_whose_job_is_deleted_without_its_pods_trains_on(job: dict[str, Any]) -> None:
    job["metadata"] |= {"deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["orphan"]}

    reply = progress_reply(job, 2)
    assert (reply.command, reply.is_deleted) == (Command.NONE, None)


def test_the_reply_of_another_job_has_no_deletion(job: dict[str, Any]) -> None:
    assert "isDeleted" not in progress_reply(job, 2).to_wire()


@pytest.mark.parametrize(("attempt", "command"), [(2, Command.STOP), (3, Command.NONE)])
def test_the_attempt_that_is_to_stop_is_asked_and_the_next_one_is_not(
    job: dict[str, Any], attempt: int, command: Command
) -> None:
    job["status"]["stop"] = {"attempt": 2, "reason": "Suspending", "time": "2026-01-31T12:00:00Z"}

    assert progress_reply(job, attempt).command is command


def asked(job: dict[str, Any], value: str, answered: str | None = None) -> dict[str, Any]:
    """Ask for a checkpoint; the status has a checkpoint that answered another request, or none."""
    job["metadata"]["annotations"] = {"ppojob.dev/checkpoint-request": value}
    answer = {} if answered is None else {"request": answered}
    job["status"]["checkpoint"] = {"step": 9, "path": "/data/c", "time": "2026-01-31T12:00:00Z", **answer}
    return job


@pytest.mark.parametrize(
    ("value", "answered", "told"),
    [
        ("r-2", None, "r-2"),
        ("r-2", "r-1", "r-2"),
        ("r-2", "r-2", None),
        ("", "r-1", None),
        ("x" * 300, None, "x" * 64),
        ("x" * 300, "x" * 64, None),
    ],
)
def test_a_checkpoint_is_asked_for_until_it_is_there(
    job: dict[str, Any], value: str, answered: str | None, told: str | None
) -> None:
    assert progress_reply(asked(job, value, answered), 2).checkpoint_request == told


def test_a_job_without_annotations_asks_for_no_checkpoint(job: dict[str, Any]) -> None:
    job["metadata"].pop("annotations", None)

    assert progress_reply(job, 2).checkpoint_request is None


def test_a_stop_asks_for_no_checkpoint_beside_its_own(job: dict[str, Any]) -> None:
    asked(job, "r-1")["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"

    assert progress_reply(job, 2).checkpoint_request is None


@pytest.mark.parametrize(("told", "kept"), [({"request": "r-2"}, "r-2"), ({}, "r-1")])
def test_an_answered_request_stays_so_in_later_checkpoints(
    report: dict[str, Any], job: dict[str, Any], told: dict[str, str], kept: str
) -> None:
    report["checkpoint"] = {"step": 12, "path": "/data/d", "time": "2026-01-31T12:01:00Z", **told}

    assert status_of(report, asked(job, "r-2", "r-1"))["checkpoint"] == {**report["checkpoint"], "request": kept}


def test_a_stop_that_is_over_is_not_asked_for_again(job: dict[str, Any]) -> None:
    time = "2026-01-31T12:00:00Z"
    job["status"]["stop"] = {"attempt": 2, "reason": "Reallocating", "time": time, "completionTime": time}

    assert progress_reply(job, 2).command is Command.NONE


def test_the_engines_of_an_elastic_pool_are_stored_and_stay_until_the_next_step(
    report: dict[str, Any], job: dict[str, Any]
) -> None:
    found = status_of({**report, "pools": [{"name": "actor", "busyFraction": 0.5, "engines": 0}]}, job)
    assert found["pools"] == [{"name": "actor", "busyFraction": "0.5", "engines": 0}]

    job["status"] |= {"pools": [{**found["pools"][0], "readyNodes": 1}]}
    assert status_of({**report, "pools": []}, job)["pools"] == found["pools"]


def test_a_pool_that_the_spec_gave_up_is_reported_as_long_as_it_is_in_force(
    report: dict[str, Any], job: dict[str, Any]
) -> None:
    busy = {**report, "pools": [{"name": "gone", "busyFraction": 0.5}]}
    assert "pools" not in status_of(busy, job)

    job["status"]["effectiveLayout"] = {"pools": [{"name": "gone"}]}
    assert status_of(busy, job)["pools"] == [{"name": "gone", "busyFraction": "0.5"}]


@pytest.mark.parametrize(
    ("conditions", "finished"),
    [
        ([], None),
        ([{"type": "Accepted", "status": "True"}], None),
        ([{"type": "Complete", "status": "False"}, {"type": "Failed", "status": "Unknown"}], None),
        ([{"type": "Accepted", "status": "True"}, {"type": "Complete", "status": "True"}], "Complete"),
        ([{"type": "Failed", "status": "True"}], "Failed"),
    ],
)
def test_a_job_is_over_when_it_is_complete_or_failed(conditions: list[dict[str, str]], finished: str | None) -> None:
    assert finished_condition({"status": {"conditions": conditions}}) == finished


def test_a_job_without_a_status_is_not_over() -> None:
    assert finished_condition({}) is None


@pytest.mark.parametrize(
    ("attempt", "number", "is_written"),
    [
        (2, 16, False),  # Another replica wrote the next one already.
        (2, 17, True),  # The trainer sent it twice, because the first answer was lost.
        (2, 18, True),
        (1, 99, False),  # Of an attempt that was replaced.
        (2, 0, False),  # Not numbered, though the same attempt has numbered reports.
    ],
)
def test_an_older_report_never_replaces_a_newer_one(
    report: dict[str, Any], job: dict[str, Any], attempt: int, number: int, is_written: bool
) -> None:
    job["status"] |= status_of(report, job)
    late = ProgressReport.model_validate({**report, "attempt": attempt, "number": number})

    assert (progress_status(late, job, NOW - timedelta(hours=1)) is not None) is is_written


def test_reports_of_a_trainer_that_does_not_number_them_follow_each_other(
    report: dict[str, Any], job: dict[str, Any]
) -> None:
    job["status"] |= status_of({**report, "number": 0}, job)

    assert status_of({**report, "number": 0, "step": 13}, job)["progress"]["step"] == 13


def test_the_next_attempt_counts_its_reports_from_the_start(report: dict[str, Any], job: dict[str, Any]) -> None:
    job["status"] |= status_of(report, job) | {"attempt": 3}

    assert status_of({**report, "attempt": 3, "number": 1}, job)["progress"]["report"] == 1


def test_a_report_of_an_attempt_that_never_began_hides_no_other(report: dict[str, Any], job: dict[str, Any]) -> None:
    job["status"] |= status_of({**report, "attempt": 10**9}, job)  # An older operator took it.

    assert status_of({**report, "number": 1}, job)["progress"]["attempt"] == 2


FAILURE = {"reason": "UploadFailed", "message": "the store is away"}


def test_the_upload_of_an_export_is_beside_its_path(report: dict[str, Any], job: dict[str, Any]) -> None:
    """A failed upload leaves the address of the one before; the next one that ends well removes the failure."""

    numbers = itertools.count(report["number"])

    def model_after(**found: Any) -> Any:
        job["status"] |= status_of({**report, "number": next(numbers), **found}, job)
        return job["status"]["model"]

    first = {"modelPath": "/data/models/step-8", "modelAddress": "s3://bucket/step-8"}
    assert model_after(**first) == {"path": "/data/models/step-8", "address": "s3://bucket/step-8"}
    later = {**first, "modelPath": "/data/models/step-16", "uploadFailure": FAILURE}
    failed = {"path": "/data/models/step-16", "address": "s3://bucket/step-8", "uploadFailure": FAILURE}
    assert model_after(**later) == failed
    assert model_after() == failed, "another attempt does not know it"
    done = {"modelPath": "/data/models/step-16", "modelAddress": "s3://bucket/step-16"}
    assert model_after(**done) == {"path": "/data/models/step-16", "address": "s3://bucket/step-16"}


def test_an_upload_without_an_export_is_not_written(report: dict[str, Any], job: dict[str, Any]) -> None:
    assert "model" not in status_of({**report, "modelAddress": "s3://bucket/step-8"}, job)
