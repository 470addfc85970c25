"""What `ppojob run` decides on this machine: paths, the run's identity, attempts."""

from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from ppojob_api.v1alpha1.data import FilesSource, HuggingFaceSource
from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_api.v1alpha1.validation import SpecError, parse_manifest
from ppojob_trainer.checkpoints import bucket, open_store
from ppojob_trainer.commands.local_paths import localize, with_absolute_paths
from ppojob_trainer.commands.local_run import job_file, next_attempt
from ppojob_trainer.commands.manifest import Manifest
from tests.bad_specs import with_changes

WORKER = {
    "name": "w",
    "path": "/data/worker.py",
    "className": "W",
    "pool": "critic",
    "hooks": [{"after": "Step", "method": "f"}],
}
FILES: dict[tuple[str | int, ...], Any] = {
    ("spec", "data", "train"): {"files": {"paths": ["/data/a.jsonl", "/data/b.jsonl"]}}
}


def _manifest(changes: dict[tuple[str | int, ...], Any] | None = None) -> Manifest:
    return Manifest(*parse_manifest(with_changes(changes or {})))


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A local folder that stands for the volume, with the model in it."""
    (tmp_path / "storage" / "model").mkdir(parents=True)
    return tmp_path / "storage"


def test_a_path_in_the_volume_is_found_in_the_storage(storage: Path) -> None:
    spec = localize(_manifest().spec, [storage])

    assert spec.model.actor.path == str(storage / "model")


def test_a_path_that_exists_as_it_is_stays(tmp_path: Path) -> None:
    spec = _manifest({("spec", "model", "actor", "path"): str(tmp_path)}).spec

    assert localize(spec, []).model.actor.path == str(tmp_path)


def test_the_first_storage_wins(tmp_path: Path, storage: Path) -> None:
    (tmp_path / "other" / "model").mkdir(parents=True)

    assert localize(_manifest().spec, [tmp_path / "other", storage]).model.actor.path == str(
        tmp_path / "other" / "model"
    )


def test_a_path_that_does_not_exist_is_refused_with_the_option_that_fixes_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        localize(_manifest().spec, [tmp_path])

    assert str(caught.value) == (
        "spec.model.actor.path: '/data/model': is not on this machine "
        f"(looked at /data/model, {tmp_path}/model): use --set spec.model.actor.path=<path here>"
    )


def test_each_source_of_a_mixture_is_looked_up(storage: Path) -> None:
    mixture = [
        {"name": "own", "files": {"paths": ["/data/a.jsonl"]}},
        {"name": "set", "huggingFace": {"path": "/data/set"}},
        {"name": "gym", "reasoningGym": {"task": "gcd"}},
    ]
    spec = _manifest({("spec", "data", "train"): {"mixture": mixture}}).spec
    (storage / "set").mkdir()

    with pytest.raises(SpecError, match=r"spec\.data\.train\.mixture\[0\]\.files\.paths: '/data/a.jsonl'"):
        localize(spec, [storage])

    (storage / "a.jsonl").touch()
    found = dict(localize(spec, [storage]).data.sources())
    assert found["data.train.mixture[0]"].files == FilesSource(paths=[str(storage / "a.jsonl")])
    assert found["data.train.mixture[1]"].hugging_face == HuggingFaceSource(path=str(storage / "set"))


@pytest.mark.parametrize("mixture", [None, "a", 5, ["a", 5, None, []], [{"files": "a"}], {"files": {}}])
def test_relative_paths_of_a_mixture_that_is_wrong_are_left_to_the_check(mixture: Any) -> None:
    raw = with_changes({("spec", "data", "train"): {"mixture": mixture}})

    found = with_absolute_paths(raw, Path("/x"))["spec"]["data"]["train"]
    assert found == {"mixture": mixture}


def test_relative_paths_of_a_mixture_are_those_below_the_folder() -> None:
    raw = with_changes({("spec", "data", "train"): {"mixture": [{"name": "own", "files": {"paths": ["a.jsonl"]}}]}})

    found = with_absolute_paths(raw, Path("/x"))["spec"]["data"]["train"]
    assert found == {"mixture": [{"name": "own", "files": {"paths": ["/x/a.jsonl"]}}]}


def test_every_file_of_a_list_is_looked_up(storage: Path) -> None:
    (storage / "a.jsonl").touch()

    with pytest.raises(SpecError, match=r"spec\.data\.train\.files\.paths: '/data/b.jsonl'"):
        localize(_manifest(FILES).spec, [storage])

    (storage / "b.jsonl").touch()
    files = localize(_manifest(FILES).spec, [storage]).data.train.files
    assert files is not None
    assert files.paths == [str(storage / "a.jsonl"), str(storage / "b.jsonl")]


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (("model", "critic"), {"path": "/data/critic"}),
        (("model", "ref"), {"path": "/data/ref"}),
        (("checkpoint",), {"resumeFrom": "/data/other/checkpoints/step-4"}),
        (("reward",), {"function": {"path": "/data/reward.py"}}),
        (("workers",), [WORKER]),
    ],
)
def test_every_path_of_the_spec_is_looked_up(storage: Path, place: tuple[str, ...], path: Any) -> None:
    with pytest.raises(SpecError, match="is not on this machine"):
        localize(_manifest({("spec", *place): path}).spec, [storage])


def test_the_files_of_a_reward_model_and_of_users_workers_are_found(storage: Path) -> None:
    (storage / "worker.py").touch()
    both: dict[tuple[str | int, ...], Any] = {
        ("spec", "model", "reward"): {"path": "/data/model"},
        ("spec", "reward", "type"): "Both",
    }
    spec = localize(_manifest({**both, ("spec", "workers"): [WORKER]}).spec, [storage])

    assert spec.model.reward is not None
    assert spec.model.reward.path == str(storage / "model")
    assert spec.workers[0].path == str(storage / "worker.py")
    (storage / "worker.py").unlink()
    with pytest.raises(SpecError, match=r"use --set spec\.workers\[0\]\.path=<path here>"):
        localize(_manifest({("spec", "workers"): [WORKER]}).spec, [storage])


def test_an_address_is_left_as_it_is(storage: Path) -> None:
    named = {"path": "s3://bucket/job", "resumeFrom": "gs://bucket/other/step-4.attempt-0"}

    checkpoint = localize(_manifest({("spec", "checkpoint"): named}).spec, [storage]).checkpoint

    assert (checkpoint.path, checkpoint.resume_from) == (named["path"], named["resumeFrom"])


@pytest.mark.parametrize(
    ("field", "name", "is_told"), [("model", "Qwen/Qwen3-8B", True), ("model", "a/b/c", False), ("data", "a/b", True)]
)
def test_a_name_of_the_hub_gets_the_form_of_its_address(storage: Path, field: str, name: str, is_told: bool) -> None:
    path = str(Path(name).absolute())
    source = {"huggingFace": {"path": path}}
    changes: dict[Any, Any] = {("spec", "model", "actor", "path"): path} if field == "model" else {}

    with pytest.raises(SpecError, match="is not on this machine") as refused:
        localize(_manifest(changes or {("spec", "data", "train"): source}).spec, [storage])

    assert (f"if it is a repository of the Hugging Face Hub, write hf://{name}" in str(refused.value)) == is_told


def test_what_an_address_names_is_fetched_beside_the_runs_folder(tmp_path: Path, storage: Path) -> None:
    source = {"huggingFace": {"path": "hf://some-org/some-data"}}

    job = job_file(_manifest({("spec", "data", "train"): source}), tmp_path / "run", None)

    assert job.spec.data.train.hugging_face is not None
    assert job.spec.data.train.hugging_face.path == str(storage / "sources/hf/datasets/some-org/some-data/main")
    assert [source.address for source in job.sources] == ["hf://some-org/some-data"]
    assert job.spec.storage.mount_path == str(storage)


def test_the_job_is_resolved_and_has_its_folder(tmp_path: Path, storage: Path) -> None:
    job = job_file(_manifest(), tmp_path / "run", None)

    assert (job.root, job.reporting) == (str(tmp_path / "run"), None)
    assert job.spec.schedule.mode is ScheduleMode.OVERLAPPED
    assert job.spec.model.actor.path == str(storage / "model")


def test_a_storage_can_be_named(tmp_path: Path, storage: Path) -> None:
    storage.rename(tmp_path / "volume")

    assert job_file(_manifest(), tmp_path / "run", tmp_path / "volume").spec.model.actor.path.startswith(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {("spec", "trainer"): {"totalSteps": 7}},
        {("spec", "checkpoint"): {"everySteps": 1}},
        {("spec", "pools", 0, "gpusPerNode"): 8},
        {("spec", "schedule"): {"mode": "Serial"}},
        {("spec", "image"): "other"},
    ],
)
def test_the_same_course_is_the_same_run(tmp_path: Path, storage: Path, changes: dict[Any, Any]) -> None:
    assert job_file(_manifest(changes), tmp_path / "run", None).uid == job_file(_manifest(), tmp_path / "run", None).uid


@pytest.mark.parametrize(
    "changes",
    [
        {("spec", "actor", "learningRate"): 1.0e-3},
        {("spec", "trainer"): {"seed": 2}},
        {("spec", "data", "train", "reasoningGym", "task"): "gcd"},
        {("spec", "algorithm"): {"gamma": 0.9}},
        {("metadata", "name"): "other"},
        {("spec", "workers"): [{**WORKER, "path": None, "module": "m"}]},
    ],
)
def test_another_course_is_another_run(tmp_path: Path, storage: Path, changes: dict[Any, Any]) -> None:
    assert job_file(_manifest(changes), tmp_path / "run", None).uid != job_file(_manifest(), tmp_path / "run", None).uid


def test_attempts_are_counted(tmp_path: Path) -> None:
    assert next_attempt(str(tmp_path)) == 0
    open_store(str(tmp_path), uid="u", attempt=4).claim()
    assert next_attempt(str(tmp_path)) == 5


def test_attempts_are_counted_in_a_bucket_too(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryStore()
    monkeypatch.setattr(bucket, "from_url", lambda address, **options: memory)

    assert next_attempt("s3://bucket/job") == 0
    open_store("s3://bucket/job", uid="u", attempt=4).claim()
    assert next_attempt("s3://bucket/job") == 5
