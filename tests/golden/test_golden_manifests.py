"""The manifests of every example are the ones that were reviewed."""

from pathlib import Path

import pytest

from tests.examples import EXAMPLES, name_of
from tests.golden.golden_manifests import GOLDEN, golden_files, render


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_example_makes_the_manifests_that_were_reviewed(example: Path) -> None:
    assert render(example) == golden_files(example), "make golden UPDATE=1, then review"


def test_no_golden_folder_is_left_over() -> None:
    names = {name_of(example) for example in EXAMPLES}

    assert {path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name != "__pycache__"} == names
