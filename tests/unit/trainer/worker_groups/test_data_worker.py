"""The data's process without Ray: a mixture of the spec becomes batches, and a resumed process continues them."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.data import DataError
from ppojob_trainer.protocol import DataProto, Keys, Ragged, rollout_batch
from ppojob_trainer.telemetry.current_phase import CurrentPhase, within_phase
from ppojob_trainer.worker_groups.roles import data
from ppojob_trainer.worker_groups.roles.data import DataWorker
from ppojob_trainer.worker_groups.worker_process import WorkerContext
from tests.good_spec import GOOD
from tests.unit.trainer.data.test_prompt_dataset import Words

FIRST = {"name": "first", "weight": 3}
SECOND = {"name": "second", "systemPrompt": "Be brief."}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of 10 and 3 prompts, and a tokenizer of words in place of the model's."""
    monkeypatch.setattr(data, "load_tokenizer", lambda model: Words())
    for name, count in (("first", 10), ("second", 3)):
        rows = [json.dumps({"prompt": f"{name} {row}", "data_source": f"set/{name}"}) for row in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def worker_of(folder: Path, *, workers: int = 1, **train: Any) -> DataWorker:
    """Return the process, with its data loaded. train: instead of the mixture of both files."""
    mixture = [{**source, "files": {"paths": [f"{folder}/{source['name']}.jsonl"]}} for source in (FIRST, SECOND)]
    spec = {
        **GOOD["spec"],
        "model": {"actor": {"path": f"{folder}/model"}},
        "data": {"train": train or {"mixture": mixture}, "trainBatchSize": 8},
        "trainer": {"dataWorkers": workers},
    }
    return DataWorker(WorkerContext("data", 0, 1, 1, folder / "log", 1.0), parse_spec(spec))


def uids(batches: list[DataProto]) -> list[str]:
    return [uid for batch in batches for uid in batch.array(Keys.UID).tolist()]


def test_both_sources_are_loaded_with_their_own_system_prompts(folder: Path) -> None:
    worker = worker_of(folder)

    loaded = worker.load()

    assert (loaded.sources, loaded.steps_per_epoch) == (["set/first", "set/second"], 1)
    batch = worker.loader.next_batch()
    roles = {
        source: [message["role"] for message in messages]
        for source, messages in zip(batch.array(Keys.SOURCE), batch.array(Keys.RAW_PROMPT), strict=True)
    }
    assert roles == {"first": ["user"], "second": ["system", "user"]}
    assert batch.array(Keys.SOURCE).tolist().count("first") == 6


@pytest.mark.parametrize("before", range(6))
def test_a_restored_process_with_other_workers_continues(folder: Path, before: int) -> None:
    undisturbed, resumed = worker_of(folder, workers=1), worker_of(folder, workers=3)
    undisturbed.load()
    resumed.load()
    for _ in range(before):
        undisturbed.loader.next_batch()

    resumed.restore(before, json.loads(json.dumps(undisturbed.loader.state_dict())))

    expected = [undisturbed.loader.next_batch() for _ in range(4)]
    assert uids([resumed.loader.next_batch() for _ in range(4)]) == uids(expected)
    assert resumed.position(before)["sources"][1]["name"] == "second"


def test_the_position_of_a_mixture_is_no_position_of_its_first_source(folder: Path) -> None:
    mixed = worker_of(folder)
    alone = worker_of(folder, files={"paths": [f"{folder}/first.jsonl"]})
    mixed.load()
    alone.load()

    with pytest.raises(DataError, match=r"name of the sources = \['first', 'second'\], now it is \[''\]"):
        alone.restore(1, mixed.loader.state_dict())
    assert {uid.count("-") for uid in uids([alone.loader.next_batch()])} == {1}


def test_prompts_that_a_step_does_not_use_come_first_in_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.ReadPrompts, "of", lambda batch, *_: batch)
    worker, other = worker_of(folder), worker_of(folder)
    worker.load()
    other.load()
    expected = uids([other.loader.next_batch(13)])

    # An epoch has 13 prompts, so the second request gets 3.
    first = uids([cast("DataProto", worker.next_batch(1, count)) for count in (10, 8)])
    worker.give_back(1, 6)
    second = uids([cast("DataProto", worker.next_batch(2, 7))])

    assert first == expected
    assert second == expected[6:]
    assert sum(source["drawn"] for source in worker.position(1)["sources"]) == 6
    worker.give_back(2, 7)
    assert worker.position(2) == other.loader.state_dict()


def test_samples_of_a_step_that_only_a_model_scores_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic sampling scores a step part by part; the first parts here have fewer rows than the step's samples."""
    spec = {
        **GOOD["spec"],
        "model": {"actor": {"path": f"{folder}/model"}, "reward": {"path": f"{folder}/model"}},
        "reward": {"type": "Model"},
        "data": {"train": {"files": {"paths": [f"{folder}/first.jsonl"]}}, "trainBatchSize": 8},
        "telemetry": {"samplesPerStep": 4},
    }
    context = WorkerContext("data", 0, 1, 1, folder / "log", 1.0, run_folder=folder)
    worker = DataWorker(context, parse_spec(spec))
    worker.load()
    monkeypatch.setattr(Words, "batch_decode", lambda self, sequences: list(map(str, sequences)), raising=False)

    for step, scores in ((1, [0.5]), (1, [1.5, 2.5]), (2, [3.5]), (1, [4.5, 5.5])):
        with within_phase(CurrentPhase("reward", "reward", step, deadline=0.0)):
            worker.write_samples(scored(scores))
    worker.renew()
    with within_phase(CurrentPhase("reward", "reward", 1, deadline=0.0)):
        worker.write_samples(scored([6.5]))

    lines = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    assert [(line["step"], line["score"]) for line in lines] == [
        (1, 0.5), (1, 1.5), (1, 2.5), (2, 3.5), (1, 4.5), (1, 6.5)
    ]  # fmt: skip


def test_a_sample_has_what_the_function_returned_and_why_it_gave_no_score(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response of a dropped row is there, although its mask is 0."""
    context = WorkerContext("data", 0, 1, 1, folder / "log", 1.0, run_folder=folder)
    spec = {
        **GOOD["spec"],
        "model": {"actor": {"path": f"{folder}/model"}},
        "data": {"train": {"files": {"paths": [f"{folder}/first.jsonl"]}}, "trainBatchSize": 8},
    }
    worker = DataWorker(context, parse_spec(spec))
    worker.load()
    monkeypatch.setattr(Words, "batch_decode", lambda self, sequences: list(map(str, sequences)), raising=False)
    batch = scored([0.5, 0.0])
    mask = batch.ragged(Keys.RESPONSE_MASK)
    dropped = {Keys.RESPONSE_MASK: mask.with_values(torch.tensor([True, False]))}
    texts: dict[str, list[Any]] = {Keys.REWARD_ERROR: ["", "it raised"], Keys.REWARD_EXTRAS: [{"length": 3}, {}]}

    with within_phase(CurrentPhase("reward", "reward", 1, deadline=0.0)):
        worker.write_samples(batch.with_fields(dropped, texts))

    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [line["extras"] for line in lines] == [{"error": "it raised"}, {"length": "3"}]
    assert [line["response"] for line in lines] == ["[2]", "[2]"]


def scored(scores: list[float]) -> DataProto:
    """Return a batch of responses of one token, with these scores."""
    number = len(scores)
    columns = rollout_batch([[1]] * number, [[2]] * number)
    columns[Keys.TOKEN_LEVEL_SCORES] = Ragged.from_rows([[score] for score in scores], torch.float32)
    texts = {name: ["x"] * number for name in (Keys.SOURCE, Keys.DATA_SOURCE, Keys.GROUND_TRUTH)}
    numbers = {name: [0] * number for name in (Keys.INDEX, Keys.SAMPLE_INDEX)}
    return DataProto.from_dict(columns, {**texts, **numbers})
