"""Who may write, what is found, what is kept, and what is refused by name: in a folder and in a bucket alike."""

import json

import pytest

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import CheckpointUnreadableError, FencedOutError, ForeignFilesError, last_attempt
from ppojob_trainer.checkpoints.readers import read_at
from tests.unit.trainer.checkpoints.places import Place, claimed, save

AUTO, NEVER = ResumePolicy.AUTO, ResumePolicy.NEVER


def steps_in(place: Place, location: str) -> list[str]:
    return [name for name in place.names(location) if name.startswith("step-")]


def test_what_was_saved_is_found_with_its_state(place: Place) -> None:
    save(place, claimed(place.root), 4)

    found = claimed(place.root, attempt=1).resume_point(AUTO, None)

    assert found is not None
    assert (found.step, found.location, found.uid) == (4, f"{place.root}/{place.name(4)}", "u")
    assert found.state == {"position": 4}
    assert place.text(f"{found.location}/shard-0") == "weights of step 4"


def test_an_empty_place_begins_afresh(place: Place) -> None:
    assert claimed(f"{place.root}/new").resume_point(AUTO, None) is None


def test_never_begins_afresh_beside_a_checkpoint(place: Place) -> None:
    save(place, claimed(place.root), 4)

    store = claimed(place.root, attempt=1)

    assert store.resume_point(NEVER, None) is None
    save(place, store, 2)
    assert steps_in(place, place.root) == [place.name(2, attempt=1)]


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [8, 12]), (3, [4, 8, 12])])
def test_the_newest_are_kept(place: Place, keep: int, left: list[int]) -> None:
    store = claimed(place.root)
    for step in (4, 8, 12):
        save(place, store, step, keep=keep)

    assert steps_in(place, place.root) == sorted(place.name(step) for step in left)


def test_retention_deletes_only_what_it_wrote(place: Place) -> None:
    store = claimed(place.root)
    save(place, store, 4, keep=1)
    for name in ("step-2-backup", "notes"):
        place.write(f"{place.root}/{name}/mine", "do not touch")

    save(place, store, 8, keep=1)

    assert place.names(place.root) == sorted({place.owner, "notes", "step-2-backup", place.name(8), "tracker.json"})


def test_a_begun_checkpoint_can_be_dropped(place: Place) -> None:
    store = claimed(place.root)
    place.write(f"{store.begin(4)}/shard-0", "half")

    store.abandon(4)

    assert place.names(place.root) == [place.owner]


def test_a_checkpoint_in_the_making_is_not_found_and_a_later_attempt_clears_it(place: Place) -> None:
    place.write(f"{claimed(place.root).begin(4)}/shard-0", "half")

    store = claimed(place.root, attempt=1)

    assert store.resume_point(AUTO, None) is None
    save(place, store, 8)
    assert place.names(place.root) == sorted({place.owner, place.name(8, attempt=1), "tracker.json"})


def test_a_step_that_is_done_again_takes_the_place_of_the_first(place: Place) -> None:
    save(place, claimed(place.root), 4)
    for attempt in (1, 1, 2):
        store = claimed(place.root, attempt=attempt)
        save(place, store, 8)

        assert steps_in(place, place.root) == [place.name(4), place.name(8, attempt=attempt)]
        newest = store.latest()
        assert newest is not None
        assert newest.step == 8


# The fence.


def test_a_lower_attempt_may_not_load(place: Place) -> None:
    claimed(place.root, attempt=2)

    with pytest.raises(FencedOutError, match="attempt 1 is fenced out: attempt 2 of the same job"):
        claimed(place.root, attempt=1)


def test_a_lower_attempt_may_not_begin_to_save(place: Place) -> None:
    old = claimed(place.root, attempt=1)
    claimed(place.root, attempt=2)

    with pytest.raises(FencedOutError):
        old.begin(4)


def test_a_lower_attempt_may_not_replace_the_tracker(place: Place) -> None:
    old = claimed(place.root, attempt=1)
    save(place, old, 4)
    place.write(f"{old.begin(8)}/shard-0", "late")
    new = claimed(place.root, attempt=2)
    before = place.text(f"{place.root}/tracker.json")

    with pytest.raises(FencedOutError) as caught:
        old.commit(8, state={}, keep=1)

    assert caught.value.newer == 2
    assert place.text(f"{place.root}/tracker.json") == before
    newest = new.latest()
    assert newest is not None
    assert newest.step == 4


def test_the_same_attempt_may_come_again(place: Place) -> None:
    save(place, claimed(place.root, attempt=1), 4)

    assert claimed(place.root, attempt=1).latest() is not None


def test_the_last_attempt_is_known(place: Place) -> None:
    assert last_attempt(f"{place.root}/new") is None
    claimed(place.root, attempt=3)
    assert last_attempt(place.root) == 3
    place.write(f"{place.root}/{place.owner}", "{")
    assert last_attempt(place.root) is None


# Another run's files.


def test_another_runs_checkpoints_are_refused_with_what_to_do(place: Place) -> None:
    save(place, claimed(place.root, uid="first"), 4)

    with pytest.raises(ForeignFilesError, match=r"uid first.*checkpoint\.resume: Never.*checkpoint\.resumeFrom"):
        claimed(place.root, uid="second")


def test_a_place_in_which_another_run_saved_nothing_is_taken_over(place: Place) -> None:
    claimed(place.root, uid="first", attempt=7)

    store = claimed(place.root, uid="second")

    assert store.resume_point(AUTO, None) is None
    assert save(place, store, 4).uid == "second"


def test_another_runs_checkpoints_are_adopted_on_purpose_and_stay(place: Place) -> None:
    theirs = [save(place, claimed(place.root, uid="first"), step) for step in (4, 8)]

    store = claimed(place.root, uid="second", adopts=True)
    found = store.resume_point(AUTO, theirs[0].location)

    assert found is not None
    assert (found.step, found.location) == (4, theirs[0].location)
    save(place, store, 6, keep=1)
    again = claimed(place.root, uid="second", attempt=1, adopts=True)
    resumed = again.resume_point(AUTO, theirs[0].location)
    assert resumed is not None
    assert (resumed.step, resumed.uid) == (6, "second"), "what it saved itself counts from then on"
    assert [read_at(each.location).uid for each in theirs] == ["first", "first"]


def test_a_run_resumes_from_the_newest_checkpoint_of_the_run_that_it_adopts(place: Place) -> None:
    first = claimed(place.root, uid="first", attempt=3)
    theirs = [save(place, first, step) for step in (4, 8)]

    found = claimed(place.root, uid="second", adopted_uid="first").resume_point(AUTO, None)

    assert found is not None
    assert (found.step, found.location) == (8, theirs[1].location)
    later = claimed(place.root, uid="second", attempt=1).resume_point(AUTO, None)
    assert later == found, "later attempts need no permission"
    with pytest.raises(ForeignFilesError, match="uid second"):
        save(place, first, 12)


@pytest.mark.parametrize("adopted_uid", ["true", "third", "unknown"])
def test_only_the_named_run_is_adopted_and_the_refusal_names_the_remedy(place: Place, adopted_uid: str) -> None:
    save(place, claimed(place.root, uid="first"), 4)

    with pytest.raises(ForeignFilesError, match=r"ppojob\.dev/adopt-checkpoints=first and run it again"):
        claimed(place.root, uid="second", adopted_uid=adopted_uid)


def test_checkpoints_without_an_owner_are_adopted_as_unknown(place: Place) -> None:
    newest = save(place, claimed(place.root), 4)
    place.remove(f"{place.root}/{place.owner}")

    with pytest.raises(ForeignFilesError, match=r"ppojob\.dev/adopt-checkpoints=unknown"):
        claimed(place.root, uid="second")
    assert claimed(place.root, uid="second", adopted_uid="unknown").resume_point(AUTO, None) == newest


def test_a_run_whose_checkpoints_were_adopted_can_save_no_more(place: Place) -> None:
    first = claimed(place.root, uid="first")
    newest = save(place, first, 4)
    claimed(place.root, uid="second", adopts=True).resume_point(AUTO, newest.location)

    with pytest.raises(ForeignFilesError, match="uid second"):
        save(place, first, 8)


def test_checkpoints_without_an_owner_are_refused(place: Place) -> None:
    save(place, claimed(place.root), 4)
    place.remove(f"{place.root}/{place.owner}")

    with pytest.raises(ForeignFilesError, match="uid unknown"):
        claimed(place.root)


def test_a_run_whose_owner_file_was_taken_does_not_save(place: Place) -> None:
    store = claimed(place.root)
    place.remove(f"{place.root}/{place.owner}")

    with pytest.raises(ForeignFilesError):
        store.begin(4)


# Broken checkpoints.


@pytest.fixture
def broken(place: Place) -> Place:
    """A run with a complete checkpoint of step 4 and one of step 8, which the tests break."""
    store = claimed(place.root)
    save(place, store, 4)
    save(place, store, 8)
    return place


def _newest(place: Place) -> str:
    return f"{place.root}/{place.name(8)}"


def _resume_fails(place: Place, match: str) -> None:
    with pytest.raises(CheckpointUnreadableError, match=match):
        claimed(place.root, attempt=1).resume_point(AUTO, None)


def test_a_missing_shard_is_named_and_the_older_one_offered(broken: Place) -> None:
    broken.remove(f"{_newest(broken)}/shard-0")

    offer = rf"to resume from step 4, set .* {broken.root}/{broken.name(4)}"
    _resume_fails(broken, rf"{broken.name(8)} cannot be read: shard-0 is missing; {offer}")


def test_a_short_shard_is_named(broken: Place) -> None:
    broken.write(f"{_newest(broken)}/shard-0", "w")

    _resume_fails(broken, "shard-0 has 1 bytes, 17 were written")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not a JSON object"), ("[]", "not a JSON object"), ('{"step": 8}', "lacks files, state, uid")],
)
def test_a_broken_manifest_is_named(broken: Place, text: str, said: str) -> None:
    broken.write(f"{_newest(broken)}/manifest.json", text)

    _resume_fails(broken, said)


def test_a_missing_checkpoint_is_named(broken: Place) -> None:
    broken.remove(_newest(broken))

    _resume_fails(broken, f"{broken.name(8)} cannot be read: {broken.nothing}; to resume from step 4")


@pytest.mark.parametrize("text", ["{", "[]", '{"uid": "u", "unknown": 1}'])
def test_a_broken_tracker_is_named(broken: Place, text: str) -> None:
    broken.write(f"{broken.root}/tracker.json", text)

    _resume_fails(broken, r"tracker\.json cannot be read: .*; to resume from step 8, set checkpoint\.resumeFrom to")


def test_without_an_older_one_the_error_says_so(broken: Place) -> None:
    for step in (4, 8):
        broken.remove(f"{broken.root}/{broken.name(step)}/shard-0")

    _resume_fails(broken, "there is no older checkpoint")


def test_what_the_loader_cannot_read_is_refused_in_the_same_words(broken: Place) -> None:
    store = claimed(broken.root, attempt=1)
    found = store.latest()
    assert found is not None

    error = CheckpointUnreadableError.of(found.location, "the shards do not fit", older=store.older_than(found.step))

    assert str(error) == (
        f"checkpoint {_newest(broken)} cannot be read: the shards do not fit; "
        f"to resume from step 4, set checkpoint.resumeFrom to {broken.root}/{broken.name(4)}"
    )


# Going on from a named checkpoint.


def test_a_run_resumes_from_another_runs_checkpoint(place: Place) -> None:
    named = save(place, claimed(f"{place.root}/first", uid="first"), 4).location

    found = claimed(f"{place.root}/second", uid="second").resume_point(AUTO, named)

    assert found is not None
    assert (found.step, found.uid) == (4, "first")


def test_later_attempts_resume_from_their_own(place: Place) -> None:
    named = save(place, claimed(f"{place.root}/first", uid="first"), 4).location
    store = claimed(f"{place.root}/second", uid="second")
    store.resume_point(AUTO, named)
    save(place, store, 6)

    again = claimed(f"{place.root}/second", uid="second", attempt=1)
    found = again.resume_point(AUTO, named)

    assert found is not None
    assert (found.step, found.uid) == (6, "second")
    save(place, again, 8)
    third = claimed(f"{place.root}/second", uid="second", attempt=2).resume_point(AUTO, named)
    assert third is not None
    assert third.step == 8


def test_an_attempt_that_ended_before_it_saved_begins_from_the_named_one_again(place: Place) -> None:
    named = save(place, claimed(f"{place.root}/first", uid="first"), 4).location
    claimed(f"{place.root}/second", uid="second").resume_point(AUTO, named)

    found = claimed(f"{place.root}/second", uid="second", attempt=1).resume_point(AUTO, named)

    assert found is not None
    assert found.uid == "first"


def test_a_run_is_wound_back_to_its_own_older_checkpoint(broken: Place) -> None:
    broken.remove(f"{_newest(broken)}/shard-0")
    named = f"{broken.root}/{broken.name(4)}"
    store = claimed(broken.root, attempt=1)

    found = store.resume_point(AUTO, named)

    assert found is not None
    assert found.step == 4
    save(broken, store, 6)
    # The abandoned steps are deleted, and the next attempt does not go back again.
    assert steps_in(broken, broken.root) == [broken.name(4), broken.name(6, attempt=1)]
    later = claimed(broken.root, attempt=2).resume_point(AUTO, named)
    assert later is not None
    assert later.step == 6


def test_a_place_with_checkpoints_is_no_checkpoint(place: Place) -> None:
    save(place, claimed(f"{place.root}/first/checkpoints", uid="first"), 4)

    with pytest.raises(CheckpointUnreadableError, match=f"it contains {place.name(4)}: name one of them"):
        claimed(f"{place.root}/second").resume_point(AUTO, f"{place.root}/first")


def test_a_named_checkpoint_that_is_not_there_is_refused(place: Place) -> None:
    with pytest.raises(CheckpointUnreadableError, match=place.nothing):
        claimed(f"{place.root}/second").resume_point(AUTO, f"{place.root}/nowhere")


def test_the_manifest_is_json_with_the_sizes_of_the_files(place: Place) -> None:
    found = save(place, claimed(place.root), 4)

    manifest = json.loads(place.text(f"{found.location}/manifest.json"))

    assert manifest["files"] == {"shard-0": 17}
    assert (manifest["step"], manifest["uid"], manifest["state"]) == (4, "u", {"position": 4})
