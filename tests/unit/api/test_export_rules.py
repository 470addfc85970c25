"""Which targets of exports are good; bad_specs.py has the bad ones."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.validation import parse_spec
from tests.good_spec import GOOD


@pytest.mark.parametrize(
    "checkpoint",
    [
        {"exportTo": "s3://bucket"},
        {"exportTo": "gs://bucket/models/products_1", "export": "Each"},
        {"exportTo": "hf://team/Products-1.5B_v2"},
        {"exportTo": "s3://bucket/job-models", "path": "s3://bucket/job"},
        {"exportTo": "s3://bucket/job", "path": "s3://bucket/job/checkpoints"},
        {"export": "Never"},
    ],
)
def test_a_target_apart_from_the_checkpoints_is_accepted(checkpoint: dict[str, Any]) -> None:
    found = parse_spec({**GOOD["spec"], "checkpoint": checkpoint})

    assert found.checkpoint.export_to == checkpoint.get("exportTo")
