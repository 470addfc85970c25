"""A folder and a bucket, for the tests of what both promise; a bucket alone, for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import MemoryStore

from tests.unit.trainer.checkpoints.places import BucketPlace, FolderPlace, Place


@pytest.fixture
def in_bucket(memory: MemoryStore) -> BucketPlace:
    return BucketPlace(memory)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return FolderPlace(tmp_path)
    found: BucketPlace = request.getfixturevalue("in_bucket")
    return found
