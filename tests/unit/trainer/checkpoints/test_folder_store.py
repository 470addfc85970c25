"""What only a folder has: names that others took, two files for owner and tracker."""

from pathlib import Path

import pytest

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import CheckpointUnreadableError
from tests.unit.trainer.checkpoints.places import FolderPlace, claimed, save


@pytest.fixture
def place(tmp_path: Path) -> FolderPlace:
    return FolderPlace(tmp_path)


def test_a_folder_in_the_way_that_another_wrote_is_set_aside(place: FolderPlace, tmp_path: Path) -> None:
    store = claimed(place.root)
    place.write(f"{place.root}/step-4/mine", "do not touch")

    save(place, store, 4)

    assert (tmp_path / "step-4.set-aside-0" / "mine").read_text() == "do not touch"
    assert store.latest() is not None


def test_a_step_that_another_wrote_is_kept_beside_ours(place: FolderPlace) -> None:
    store = claimed(place.root)
    place.write(f"{place.root}/step-1/mine", "do not touch")

    save(place, store, 8, keep=1)

    assert place.names(place.root) == ["owner.json", "step-1", "step-8", "tracker.json"]


def test_a_broken_owner_is_named(place: FolderPlace) -> None:
    place.write(f"{place.root}/owner.json", '{"uid": "u"}')

    with pytest.raises(CheckpointUnreadableError, match=r"owner\.json cannot be read: it lacks uid or attempt"):
        claimed(place.root, attempt=1)


def test_a_lost_tracker_does_not_lose_the_run(place: FolderPlace) -> None:
    store = claimed(place.root)
    save(place, store, 4)
    save(place, store, 8)
    place.remove(f"{place.root}/tracker.json")

    found = claimed(place.root, attempt=1).resume_point(ResumePolicy.AUTO, None)

    assert found is not None
    assert found.step == 8
