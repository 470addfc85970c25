"""Today's operator reads the reports of other trainers, recorded with their own code, and of newer ones."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_operator.status_server.fields import fetch_status, progress_status
from ppojob_operator.status_server.intake import parse_fetch_report, parse_report
from tests.contracts import COMPATIBLE, messages, with_unknown_fields

NOW = datetime(2026, 1, 31, 12, 5, tzinfo=UTC)
MAPS = ("metrics",)
"""Objects of a report whose names are free."""


def newer(message: dict[str, Any]) -> dict[str, Any]:
    """Return a report of a newer trainer."""
    return {**with_unknown_fields(message), **{name: message[name] for name in MAPS if name in message}}


@pytest.mark.parametrize(("place", "message"), messages("ProgressReport"))
def test_the_report_of_another_trainer_becomes_the_status(place: str, message: dict[str, Any], job: Any) -> None:
    job["status"]["attempt"] = message["attempt"]
    report = parse_report(json.dumps(message).encode())

    status = progress_status(report, job, NOW)

    assert status is not None
    read = PPOJobStatus.model_validate({"conditions": [], **status})
    assert read.progress is not None
    assert (read.progress.step, read.progress.activity) == (message.get("step", 0), message["activity"])
    assert (read.checkpoint is None) == ("checkpoint" not in message)
    assert parse_report(json.dumps(newer(message)).encode()) == report


@pytest.mark.parametrize(("place", "message"), messages("FetchReport"))
def test_the_report_on_a_fetch_of_another_version_becomes_the_status(
    place: str, message: dict[str, Any], job: Any
) -> None:
    report = parse_fetch_report(json.dumps(message).encode())

    status = fetch_status(report, "pod", job, NOW)

    assert status is not None
    PPOJobStatus.model_validate({"conditions": [], **status})
    assert parse_fetch_report(json.dumps(newer(message)).encode()) == report


def test_every_version_that_is_supported_has_recorded_reports() -> None:
    assert {place.partition("/")[0] for place, _ in messages("ProgressReport")} >= set(COMPATIBLE)
    assert {place.partition("/")[0] for place, _ in messages("FetchReport")} >= set(COMPATIBLE)
