"""What the operator reads of an object that another version has written."""

from typing import Any

import pytest
from pydantic import ValidationError

from ppojob_operator.reading import read_job

OLD_LAYOUT = {"placement": {"actor": "actor", "ref": "critic", "reward": "critic"}, "pools": []}
"""Of a version whose `placement.ref` and `placement.reward` were one pool each."""


def stored(condition: str) -> dict[str, Any]:
    """Return a job with that layout; its condition is True."""
    metadata = {"namespace": "ns", "name": "products", "uid": "u", "generation": 1}
    time = "2026-01-31T12:00:00Z"
    of_job = {"reason": "R", "message": "", "lastTransitionTime": time, "observedGeneration": 1}
    conditions = [{"type": condition, "status": "True", **of_job}]
    status = {"effectiveLayout": OLD_LAYOUT, "conditions": conditions, "completionTime": time}
    return {"metadata": metadata, "spec": {"runPolicy": {"ttlSecondsAfterFinished": 60}}, "status": status}


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
def test_an_ended_job_is_read_without_a_layout_of_another_version(condition: str) -> None:
    job = read_job(stored(condition))

    assert job.status.effective_layout is None
    assert job.status.completion_time is not None
    assert job.ttl_seconds_after_finished == 60


def test_a_layout_of_another_version_in_which_a_job_runs_is_an_error() -> None:
    with pytest.raises(ValidationError, match="effectiveLayout"):
        read_job(stored("Running"))


def test_other_fields_of_an_ended_job_are_not_ignored() -> None:
    raw = stored("Failed")
    raw["status"]["attempt"] = "first"

    with pytest.raises(ValidationError, match="attempt"):
        read_job(raw)
