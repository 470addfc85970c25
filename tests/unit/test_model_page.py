"""docs/using-the-model.md: its settings are valid, and its names and numbers are those of the code."""

import re
from pathlib import Path

import yaml

from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.exports import uploads
from ppojob_trainer.exports.target import MANIFEST
from tests.good_spec import GOOD

PAGE = Path("docs/using-the-model.md").read_text()


def test_the_target_of_the_page_is_valid_and_its_secret_is_read() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    secret, job = yaml.safe_load_all(block)

    spec = parse_spec({**GOOD["spec"], **job["spec"]})

    assert spec.checkpoint.export_to == "hf://team/products"
    assert spec.env_from == [{"secretRef": {"name": secret["metadata"]["name"]}}]
    assert list(secret["stringData"]) == ["HF_TOKEN"]


def test_the_key_that_completes_an_export_is_named() -> None:
    assert f"`{MANIFEST}` is written last" in PAGE


def test_how_long_an_operation_is_tried_again() -> None:
    waits = [min(uploads.FIRST_WAIT_S * 2**number, uploads.LONGEST_WAIT_S) for number in range(uploads.ATTEMPTS - 1)]

    assert len(waits) == 7, "repeated seven times"
    assert 6.5 < sum(waits) / 60 < 7, "within about seven minutes"
    assert "repeated seven times within about seven minutes" in PAGE
