"""Who may write, what is found, what is kept, and what is refused by name."""

import json
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import (
    Checkpoint,
    CheckpointStore,
    CheckpointUnreadableError,
    FencedOutError,
    ForeignFilesError,
    last_attempt,
)

AUTO, NEVER = ResumePolicy.AUTO, ResumePolicy.NEVER


def _store(folder: Path, *, attempt: int = 0, uid: str = "u") -> CheckpointStore:
    store = CheckpointStore(folder, uid=uid, attempt=attempt)
    store.claim()
    return store


def _save(store: CheckpointStore, step: int, *, keep: int = 10) -> Checkpoint:
    (store.begin(step) / "shard-0").write_text(f"weights of step {step}")
    return store.commit(step, state={"position": step}, keep=keep)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_found_with_its_state(tmp_path: Path) -> None:
    _save(_store(tmp_path), 4)

    found = _store(tmp_path, attempt=1).resume_point(AUTO, None)

    assert found is not None
    assert (found.step, found.path, found.uid) == (4, tmp_path / "step-4", "u")
    assert found.state == {"position": 4}
    assert (found.path / "shard-0").read_text() == "weights of step 4"


def test_an_empty_folder_begins_afresh(tmp_path: Path) -> None:
    assert _store(tmp_path / "new").resume_point(AUTO, None) is None


def test_never_begins_afresh_beside_a_checkpoint(tmp_path: Path) -> None:
    _save(_store(tmp_path), 4)

    store = _store(tmp_path, attempt=1)

    assert store.resume_point(NEVER, None) is None
    _save(store, 2)
    assert _names(tmp_path) == ["owner.json", "step-2", "tracker.json"]


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [8, 12]), (3, [4, 8, 12])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    store = _store(tmp_path)
    for step in (4, 8, 12):
        _save(store, step, keep=keep)

    assert [name for name in _names(tmp_path) if name.startswith("step-")] == sorted(f"step-{s}" for s in left)


def test_retention_deletes_only_what_it_wrote(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _save(store, 4, keep=1)
    for name in ("step-1", "step-2-backup", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("do not touch")

    _save(store, 8, keep=1)

    assert _names(tmp_path) == ["notes", "owner.json", "step-1", "step-2-backup", "step-8", "tracker.json"]


def test_a_folder_in_the_way_that_another_wrote_is_set_aside(tmp_path: Path) -> None:
    store = _store(tmp_path)
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "mine").write_text("do not touch")

    _save(store, 4)

    assert (tmp_path / "step-4.set-aside-0" / "mine").read_text() == "do not touch"
    assert store.latest() is not None


def test_a_begun_folder_can_be_dropped(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.begin(4)

    store.abandon(4)

    assert _names(tmp_path) == ["owner.json"]


def test_a_folder_in_the_making_is_not_found(tmp_path: Path) -> None:
    (_store(tmp_path).begin(4) / "shard-0").write_text("half")

    assert _store(tmp_path, attempt=1).resume_point(AUTO, None) is None


# The fence.


def test_a_lower_attempt_may_not_load(tmp_path: Path) -> None:
    _store(tmp_path, attempt=2)

    with pytest.raises(FencedOutError, match="attempt 1 is fenced out: attempt 2 of the same job"):
        _store(tmp_path, attempt=1)


def test_a_lower_attempt_may_not_begin_to_save(tmp_path: Path) -> None:
    old = _store(tmp_path, attempt=1)
    _store(tmp_path, attempt=2)

    with pytest.raises(FencedOutError):
        old.begin(4)


def test_a_lower_attempt_may_not_replace_the_tracker(tmp_path: Path) -> None:
    old = _store(tmp_path, attempt=1)
    _save(old, 4)
    (old.begin(8) / "shard-0").write_text("late")
    _store(tmp_path, attempt=2)

    with pytest.raises(FencedOutError) as caught:
        old.commit(8, state={}, keep=1)

    assert caught.value.newer == 2
    assert json.loads((tmp_path / "tracker.json").read_text())["step"] == 4


def test_the_same_attempt_may_come_again(tmp_path: Path) -> None:
    _save(_store(tmp_path, attempt=1), 4)

    assert _store(tmp_path, attempt=1).latest() is not None


def test_the_last_attempt_is_known(tmp_path: Path) -> None:
    assert last_attempt(tmp_path / "new") is None
    _store(tmp_path, attempt=3)
    assert last_attempt(tmp_path) == 3


# Another run's files.


def test_another_runs_checkpoints_are_refused_with_what_to_do(tmp_path: Path) -> None:
    _save(_store(tmp_path, uid="first"), 4)

    with pytest.raises(ForeignFilesError, match=r"uid first.*another name.*checkpoint\.resumeFrom"):
        _store(tmp_path, uid="second")


def test_a_folder_in_which_another_run_saved_nothing_is_taken_over(tmp_path: Path) -> None:
    _store(tmp_path, uid="first", attempt=7)

    store = _store(tmp_path, uid="second")

    assert store.resume_point(AUTO, None) is None
    assert _save(store, 4).uid == "second"


def test_checkpoints_without_an_owner_are_refused(tmp_path: Path) -> None:
    _save(_store(tmp_path), 4)
    (tmp_path / "owner.json").unlink()

    with pytest.raises(ForeignFilesError, match="uid unknown"):
        _store(tmp_path)


def test_a_run_whose_owner_file_was_taken_does_not_save(tmp_path: Path) -> None:
    store = _store(tmp_path)
    (tmp_path / "owner.json").unlink()

    with pytest.raises(ForeignFilesError):
        store.begin(4)


# Broken folders.


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A run with a whole checkpoint of step 4 and one of step 8, which the tests break."""
    store = _store(tmp_path)
    _save(store, 4)
    _save(store, 8)
    return tmp_path


def _resume_fails(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointUnreadableError, match=match):
        _store(folder, attempt=1).resume_point(AUTO, None)


def test_a_missing_shard_is_named_and_the_older_one_offered(broken: Path) -> None:
    (broken / "step-8" / "shard-0").unlink()

    _resume_fails(broken, rf"step-8 cannot be read: shard-0 is missing; to go on from step 4, set .* {broken}/step-4")


def test_a_short_shard_is_named(broken: Path) -> None:
    (broken / "step-8" / "shard-0").write_text("w")

    _resume_fails(broken, "shard-0 has 1 bytes, 17 were written")


@pytest.mark.parametrize(
    ("text", "said"), [("{", "no JSON object"), ("[]", "no JSON object"), ('{"step": 8}', "lacks files, state, uid")]
)
def test_a_broken_manifest_is_named(broken: Path, text: str, said: str) -> None:
    (broken / "step-8" / "manifest.json").write_text(text)

    _resume_fails(broken, said)


def test_a_missing_folder_is_named(broken: Path) -> None:
    (broken / "step-8").rename(broken / "elsewhere")

    _resume_fails(broken, "step-8 cannot be read: there is no such folder; to go on from step 4")


def test_a_broken_tracker_is_named(broken: Path) -> None:
    (broken / "tracker.json").write_text("{")

    _resume_fails(broken, r"tracker\.json cannot be read")


def test_a_broken_owner_is_named(broken: Path) -> None:
    (broken / "owner.json").write_text('{"uid": "u"}')

    with pytest.raises(CheckpointUnreadableError, match=r"owner\.json cannot be read: it lacks uid or attempt"):
        _store(broken, attempt=1)


def test_without_an_older_one_the_error_says_so(broken: Path) -> None:
    for step in (4, 8):
        (broken / f"step-{step}" / "shard-0").unlink()

    _resume_fails(broken, "there is no older one")


def test_a_lost_tracker_does_not_lose_the_run(broken: Path) -> None:
    (broken / "tracker.json").unlink()

    found = _store(broken, attempt=1).resume_point(AUTO, None)

    assert found is not None
    assert found.step == 8


def test_what_the_loader_cannot_read_is_refused_in_the_same_words(broken: Path) -> None:
    store = _store(broken, attempt=1)
    found = store.latest()
    assert found is not None

    error = CheckpointUnreadableError.of(found, "the shards do not fit", older=store.older_than(found.step))

    assert str(error) == (
        f"checkpoint {broken}/step-8 cannot be read: the shards do not fit; "
        f"to go on from step 4, set checkpoint.resumeFrom to {broken}/step-4"
    )


# Going on from a named folder.


def test_a_run_goes_on_from_another_runs_checkpoint(tmp_path: Path) -> None:
    _save(_store(tmp_path / "first", uid="first"), 4)

    found = _store(tmp_path / "second", uid="second").resume_point(AUTO, str(tmp_path / "first" / "step-4"))

    assert found is not None
    assert (found.step, found.uid) == (4, "first")


def test_later_attempts_go_on_from_their_own(tmp_path: Path) -> None:
    _save(_store(tmp_path / "first", uid="first"), 4)
    named = str(tmp_path / "first" / "step-4")
    store = _store(tmp_path / "second", uid="second")
    store.resume_point(AUTO, named)
    _save(store, 6)

    again = _store(tmp_path / "second", uid="second", attempt=1)
    found = again.resume_point(AUTO, named)

    assert found is not None
    assert (found.step, found.uid) == (6, "second")
    _save(again, 8)
    third = _store(tmp_path / "second", uid="second", attempt=2).resume_point(AUTO, named)
    assert third is not None
    assert third.step == 8


def test_an_attempt_that_died_before_it_saved_begins_from_the_named_folder_again(tmp_path: Path) -> None:
    _save(_store(tmp_path / "first", uid="first"), 4)
    named = str(tmp_path / "first" / "step-4")
    _store(tmp_path / "second", uid="second").resume_point(AUTO, named)

    found = _store(tmp_path / "second", uid="second", attempt=1).resume_point(AUTO, named)

    assert found is not None
    assert found.uid == "first"


def test_a_run_is_wound_back_to_its_own_older_checkpoint(broken: Path) -> None:
    (broken / "step-8" / "shard-0").unlink()
    named = str(broken / "step-4")
    store = _store(broken, attempt=1)

    found = store.resume_point(AUTO, named)

    assert found is not None
    assert found.step == 4
    _save(store, 6)
    # The course that was given up is gone, and the next attempt does not go back again.
    assert _names(broken) == ["owner.json", "step-4", "step-6", "tracker.json"]
    later = _store(broken, attempt=2).resume_point(AUTO, named)
    assert later is not None
    assert later.step == 6


def test_a_folder_of_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    _save(_store(tmp_path / "first" / "checkpoints", uid="first"), 4)

    with pytest.raises(CheckpointUnreadableError, match="it holds step-4: name one"):
        _store(tmp_path / "second").resume_point(AUTO, str(tmp_path / "first"))


def test_a_named_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadableError, match="there is no such folder"):
        _store(tmp_path / "second").resume_point(AUTO, str(tmp_path / "nowhere"))
