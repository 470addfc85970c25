"""Models and data come from a hub into the storage: complete, once, and refused early where they are of no use."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.engine import Engine, EngineClass
from ppojob_trainer.commands.fetch import FetchError, FetchRefusedError, State, fetch_all
from ppojob_trainer.commands.fetch.folders import MARKER
from ppojob_trainer.commands.local_run import fetch
from ppojob_trainer.storage_lock import StorageLock
from tests.unit.trainer.fetch.conftest import DATA, FAST, MODEL, WEIGHTS, MakeJob, files_source, model_files, parquet
from tests.unit.trainer.fetch.hub_server import TOKEN, Hub, Repository

TRAIN = f"hf://datasets/{DATA}/main/train.parquet"
COLUMNS = {"promptColumn": "question", "groundTruthColumn": "answer"}


def fetched(job: object) -> State:
    """Fetch all, and return what was found."""
    state = State()
    fetch_all(job, state, "tests", FAST)  # type: ignore[arg-type]
    return state


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_model_is_fetched_without_what_nobody_reads(hub: Hub, make_job: MakeJob, storage: Path) -> None:
    job = make_job()

    state = fetched(job)

    folder = storage / "sources/hf/models/acme/tiny/main"
    assert job.spec.model.actor.path == str(folder)
    assert names(folder) == [MARKER, "config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert names(folder.parent) == [f"main/{name}" for name in names(folder)], "nothing is left beside it"
    [source] = state.sources
    size = sum((folder / name).stat().st_size for name in names(folder) if name != MARKER)
    assert (source.address, source.path, source.revision) == (f"hf://{MODEL}", str(folder), "c" * 40)
    assert source.bytes == size == state.total == state.done


def test_the_marker_has_address_commit_and_sizes(hub: Hub, make_job: MakeJob) -> None:
    job = make_job()
    fetched(job)

    marker = json.loads((Path(job.spec.model.actor.path) / MARKER).read_text())

    assert marker["address"] == f"hf://{MODEL}"
    assert marker["revision"] == "c" * 40
    assert marker["files"]["model.safetensors"] == len(WEIGHTS)


def test_python_files_come_with_trust_remote_code_alone_and_into_a_separate_folder(hub: Hub, make_job: MakeJob) -> None:
    fetched(make_job())
    hub.repositories["models", MODEL].files["config.json"] = json.dumps({"auto_map": {}, "model_type": "own"}).encode()

    job = make_job(trustRemoteCode=True)
    fetched(job)

    assert "models-with-code" in job.spec.model.actor.path
    assert "modeling_own.py" in names(Path(job.spec.model.actor.path))


def test_what_is_complete_is_not_asked_for_again(hub: Hub, make_job: MakeJob) -> None:
    fetched(make_job())
    hub.requests.clear()

    state = fetched(make_job())

    assert hub.requests == []
    assert [source.revision for source in state.sources] == ["c" * 40]


def test_a_data_file_is_fetched_and_its_columns_are_found(hub: Hub, make_job: MakeJob, storage: Path) -> None:
    job = make_job(train=files_source(TRAIN, **COLUMNS))

    state = fetched(job)

    assert job.spec.data.train.files is not None
    [path] = job.spec.data.train.files.paths
    assert Path(path).name == "train.parquet"
    assert Path(path).is_relative_to(storage / "sources/hf/files/acme/sums/main")
    assert names(Path(path).parent) == [MARKER, "train.parquet"]
    assert [source.address for source in state.sources] == [TRAIN, f"hf://{MODEL}"], "data first"
    assert [source.revision for source in state.sources] == ["d" * 40, "c" * 40]


def test_a_whole_data_set_is_fetched(hub: Hub, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_source = {"path": f"hf://{DATA}@main", **COLUMNS}
    hub.repositories["datasets", DATA].files = {"train.parquet": parquet(question=["1+1?"], answer=["2"])}

    job = make_job(train={"huggingFace": hub_source})
    fetched(job)

    assert job.spec.data.train.hugging_face is not None
    assert names(Path(job.spec.data.train.hugging_face.path)) == [MARKER, "train.parquet"]


def test_wrong_columns_of_a_source_of_a_mixture_are_refused(hub: Hub, make_job: MakeJob) -> None:
    gym = {"name": "gym", "reasoningGym": {"task": "gcd"}}
    right = make_job(train={"mixture": [gym, {"name": "own", **files_source(TRAIN, **COLUMNS)}]})
    wrong = make_job(train={"mixture": [gym, {"name": "own", **files_source(TRAIN, promptColumn="prompt")}]})

    assert TRAIN in [source.address for source in fetched(right).sources]
    with pytest.raises(FetchRefusedError, match=r"spec.data.train.mixture\[1\]: .*no column 'prompt'; there are"):
        fetched(wrong)


def test_wrong_columns_are_refused_before_the_weights_are_downloaded(hub: Hub, make_job: MakeJob) -> None:
    job = make_job(train=files_source(TRAIN, promptColumn="prompt"))

    with pytest.raises(FetchRefusedError, match=r"spec.data.train: .*no column 'prompt'; there are question, answer"):
        fetched(job)

    assert hub.downloads("model.safetensors") == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "t5"},
            r"t5 is not a causal language model of transformers: use a model of one of .* llama, qwen2",
        ),
        ({"model_type": "olmoe"}, "olmoe is a mixture of experts that is not supported"),
        (
            {"attention_dropout": 0.1},
            "llama has attention_dropout=0.1, which is not supported: use a model whose config.json",
        ),
        ({"model_type": "no-such-family"}, "no-such-family"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"it is quantized \(mxfp4\), .*: use the checkpoint in bfloat16 \(docs/models-and-data.md, gpt-oss",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_its_weights_are_downloaded(
    hub: Hub, make_job: MakeJob, config: dict[str, object], words: str
) -> None:
    hub.repositories["models", MODEL].files = model_files(**config)

    with pytest.raises(FetchRefusedError, match=rf"spec.model.actor.path hf://{MODEL}: .*{words}"):
        fetched(make_job())

    assert hub.downloads("config.json") == 1
    assert hub.downloads("model.safetensors") == 0


def test_a_model_for_the_users_own_engine_is_fetched_whatever_its_family(hub: Hub, make_job: MakeJob) -> None:
    hub.repositories["models", MODEL].files = model_files(attention_dropout=0.1)
    job = make_job()
    engine = EngineClass(module="own", class_name="Own")
    actor = job.spec.actor.model_copy(update={"engine": Engine.CLASS, "engine_class": engine})

    fetched(job.model_copy(update={"spec": job.spec.model_copy(update={"actor": actor})}))

    assert hub.downloads("model.safetensors") == 1


def test_a_repository_without_weights_is_refused_with_what_is_there(hub: Hub, make_job: MakeJob) -> None:
    hub.repositories["models", MODEL].files = {"README.md": b"", "model.gguf": b"x"}

    with pytest.raises(FetchRefusedError, match=r"it needs config.json and .*; there is README.md, model.gguf"):
        fetched(make_job())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "hf://acme/nothing",
            r"there is no model acme/nothing at .* \(401\): correct the name, accept its licence, or",
        ),
        (f"hf://{MODEL}@v9", "has no revision 'v9': give a branch, a tag or a commit"),
    ],
)
def test_what_is_not_there_is_refused(hub: Hub, make_job: MakeJob, address: str, words: str) -> None:
    with pytest.raises(FetchRefusedError, match=rf"spec.model.actor.path {address}: .*{words}"):
        fetched(make_job(address))


def test_a_file_that_is_not_there_is_refused(hub: Hub, make_job: MakeJob) -> None:
    address = f"hf://datasets/{DATA}/main/test.parquet"

    with pytest.raises(FetchRefusedError, match=r"has no file main/test.parquet in revision 'main'"):
        fetched(make_job(train=files_source(address, **COLUMNS)))


def test_a_protected_repository_takes_the_token(hub: Hub, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["models", MODEL].access = "private"
    with pytest.raises(FetchRefusedError, match=r"give a token by HF_TOKEN in spec\.env, from a Secret"):
        fetched(make_job())

    monkeypatch.setenv("HF_TOKEN", TOKEN)

    assert len(fetched(make_job()).sources) == 1


def test_a_licence_that_was_not_accepted_is_refused(hub: Hub, make_job: MakeJob) -> None:
    hub.repositories["models", MODEL].access = "gated"

    with pytest.raises(FetchRefusedError, match=r"access to acme/tiny is restricted \(403\): accept its licence"):
        fetched(make_job())


def test_a_hub_that_is_down_may_come_back(hub: Hub, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(FetchError, match=r"set HF_ENDPOINT in spec\.env to a mirror, or copy the files") as failure:
        fetched(make_job())

    assert not isinstance(failure.value, FetchRefusedError)


def test_an_overloaded_hub_may_come_back(hub: Hub, make_job: MakeJob) -> None:
    hub.failures = [500] * 50

    with pytest.raises(FetchError) as failure:
        fetched(make_job())

    assert not isinstance(failure.value, FetchRefusedError)


def test_too_little_space_is_refused_before_the_weights_are_downloaded(
    hub: Hub, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 10**3))

    with pytest.raises(FetchRefusedError, match=r"has 0.00 GB free, and 0.00 GB are needed for hf://acme/tiny"):
        fetched(make_job())

    assert hub.downloads("model.safetensors") == 0


def test_a_folder_that_lost_a_file_is_refused_and_named(hub: Hub, make_job: MakeJob) -> None:
    job = make_job()
    fetched(job)
    (Path(job.spec.model.actor.path) / "model.safetensors").unlink()

    with pytest.raises(FetchRefusedError, match=r"is not as it was fetched .*model.safetensors.*: remove it"):
        fetched(job)


def test_a_fetch_continues_with_the_files_that_are_complete(hub: Hub, make_job: MakeJob) -> None:
    files = model_files()
    files["model-2.safetensors"] = WEIGHTS
    hub.repositories["models", MODEL] = Repository(files)
    job = make_job()
    real = hub.repositories["models", MODEL].files.pop("model-2.safetensors")
    incomplete = Path(job.sources[0].folder).with_name(".main.incomplete")
    with pytest.MonkeyPatch.context() as patch:
        from ppojob_trainer.commands.fetch.folders import SourceFolder

        def cut_off(self: SourceFolder, listing: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(SourceFolder, "publish", cut_off)
        with pytest.raises(KeyboardInterrupt):
            fetched(job)
    assert "model.safetensors" in names(incomplete)
    assert not Path(job.spec.model.actor.path).exists()
    hub.repositories["models", MODEL].files["model-2.safetensors"] = real
    hub.requests.clear()

    fetched(job)

    assert hub.downloads("model.safetensors") == 0, "it was there already"
    assert hub.downloads("model-2.safetensors") == 1


def test_what_another_one_has_fetched_meanwhile_is_not_downloaded_again(
    hub: Hub, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, held = make_job(), StorageLock.held

    @contextmanager
    def held_after_another(self: StorageLock, on_wait: Callable[[str], None]) -> Iterator[None]:
        monkeypatch.setattr(StorageLock, "held", held)
        fetched(job)
        with held(self, on_wait):
            yield

    monkeypatch.setattr(StorageLock, "held", held_after_another)

    assert [source.revision for source in fetched(job).sources] == ["c" * 40]
    assert hub.downloads("model.safetensors") == 1


def test_ppojob_run_fetches_and_says_how_far_it_is(hub: Hub, make_job: MakeJob) -> None:
    job, said = make_job(), list[str]()

    fetch(job, said.append)

    assert (Path(job.spec.model.actor.path) / "model.safetensors").read_bytes() == WEIGHTS
    assert said[0].endswith(" GB") or f"hf://{MODEL}" in said[0]
    assert said[-1] == f"hf://{MODEL} is in {job.spec.model.actor.path}"
