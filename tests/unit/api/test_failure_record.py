"""The trainer's name for its failure: one marked line of the log, found again among others."""

import pytest

from ppojob_api.v1alpha1.constants import STATUS_METRICS, Reason
from ppojob_api.v1alpha1.progress import Activity, FailureKind, FailureRecord, ProgressReply, ProgressReport

RECORD = FailureRecord(
    reason=Reason.MODEL_NOT_FOUND,
    message='model.actor.path "/data/x" holds no config.json:\nprepare the model, or correct the path — ünïcode too',
    kind=FailureKind.PERMANENT,
    exit_code=3,
)


def test_a_record_survives_the_log() -> None:
    assert FailureRecord.from_log(RECORD.to_log_line()) == RECORD


def test_a_record_is_one_line() -> None:
    assert len(RECORD.to_log_line().splitlines()) == 1


def test_a_record_is_found_behind_a_prefix_and_before_other_lines() -> None:
    log = f"start\n(main pid=7) 12:00:01 ERROR {RECORD.to_log_line()}\nray: shutting down\n"

    assert FailureRecord.from_log(log) == RECORD


def test_the_last_record_counts() -> None:
    older = RECORD.model_copy(update={"reason": Reason.WORKER_LOST})

    assert FailureRecord.from_log(f"{older.to_log_line()}\n{RECORD.to_log_line()}\n") == RECORD


@pytest.mark.parametrize("log", ["", "all is well\n", "PPOJOB-FAILURE not json", 'PPOJOB-FAILURE {"reason": ""}'])
def test_a_log_without_a_record_gives_none(log: str) -> None:
    assert FailureRecord.from_log(log) is None


def test_a_torn_record_gives_none() -> None:
    assert FailureRecord.from_log(RECORD.to_log_line()[:-10]) is None


def test_the_status_shows_at_most_64_metrics_each_once() -> None:
    assert len(STATUS_METRICS) == len(set(STATUS_METRICS)) <= 64


def test_a_report_speaks_camel_case() -> None:
    wire = ProgressReport(
        uid="u", attempt=1, activity=Activity.TRAINING, step=3, total_steps=8, model_path="/m"
    ).to_wire()

    assert (wire["totalSteps"], wire["modelPath"], wire["activity"]) == (8, "/m", "Training")
    assert "etaSeconds" not in wire


def test_an_empty_reply_asks_for_nothing() -> None:
    assert ProgressReply.model_validate_json("{}") == ProgressReply()
    assert ProgressReply.model_validate_json('{"command": "Stop", "ofTomorrow": 1}').command == "Stop"
