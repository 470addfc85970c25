"""Token ids of all prompts: the same from any number of processes, cached, and renewed when something changes."""

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.data import DataSource
from ppojob_trainer.data import DataError, Preparation, TableCache, TokenizedPrompts, tokens
from tests.unit.trainer.data.test_prompt_dataset import Words

COUNT = 50


class NeverAsked(Words):
    """A tokenizer whose results are cached already."""

    def __call__(self, text, *, add_special_tokens):
        raise AssertionError("it is in the cache")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"prompt": "w " * (row % 7) + "w", "data_source": f"s{row % 3}"}) for row in range(COUNT)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def preparation(tmp_path: Path, rows: Path) -> Preparation:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    source = DataSource.model_validate({"files": {"paths": [str(rows)]}})
    return Preparation(source, str(model), Words, cache=TableCache(tmp_path / "cache", "job"))


def tokenized(preparation: Preparation) -> TokenizedPrompts:
    return preparation.tokenized(*preparation.opened())


def lists(found: TokenizedPrompts) -> list[list[int]]:
    return [found.token_ids(index) for index in range(len(found))]


def test_each_prompt_has_its_tokens_and_its_data_source(preparation: Preparation) -> None:
    found = tokenized(preparation)
    assert found.token_ids(2) == [16, 11, 11, 11, 21]
    assert found.lengths.tolist() == [row % 7 + 3 for row in range(COUNT)]
    assert found.data_sources() == {"s0", "s1", "s2"}


def test_the_second_start_tokenizes_nothing(preparation: Preparation) -> None:
    expected = lists(tokenized(preparation))
    assert lists(tokenized(dataclasses.replace(preparation, load_tokenizer=NeverAsked))) == expected


def test_another_number_of_processes_finds_the_same_cache(preparation: Preparation) -> None:
    tokenized(preparation)
    assert tokenized(dataclasses.replace(preparation, load_tokenizer=NeverAsked, workers=3)).lengths[0] == 3


def test_what_changes_the_tokens_changes_the_key(preparation: Preparation, rows: Path) -> None:
    def files(now: Preparation) -> int:
        tokenized(now)
        return len(list((rows.parent / "cache").glob("*.arrow")))

    assert files(preparation) == 1
    model = Path(preparation.model)
    (model / "model.safetensors").write_text("weights")
    assert files(preparation) == 1
    (model / "tokenizer.json").write_text("{ }")
    assert files(preparation) == 2
    assert files(dataclasses.replace(preparation, chat_template="other")) == 3
    assert files(dataclasses.replace(preparation, chat_template_kwargs={"thinking": False})) == 4
    source = preparation.source.model_copy(update={"system_prompt": "Be short."})
    assert files(dataclasses.replace(preparation, source=source)) == 5
    os.utime(rows, ns=(0, 0))
    assert files(preparation) == 6


def test_a_bad_row_is_named_and_nothing_is_cached(preparation: Preparation, rows: Path) -> None:
    with rows.open("a") as file:
        file.write('\n{"prompt": 3}')
    with pytest.raises(DataError, match=f"row {COUNT}, column 'prompt': a prompt is a string or a list"):
        tokenized(preparation)
    assert list((rows.parent / "cache").iterdir()) == []


def test_the_progress_is_logged(preparation: Preparation, monkeypatch, caplog) -> None:
    monkeypatch.setattr(tokens, "_LOG_EVERY_S", 0.0)
    monkeypatch.setattr(tokens, "_BLOCK", 20)
    with caplog.at_level(logging.INFO):
        tokenized(preparation)
    assert f"20 of {COUNT} prompts tokenized (40 %)" in caplog.text
    assert f"{COUNT} of {COUNT} prompts tokenized (100 %), about 0 s left" in caplog.text


class Ends(Words):
    """A tokenizer that ends its process."""

    def __call__(self, text, *, add_special_tokens):
        os._exit(9)


class Waits(Words):
    """A tokenizer that writes its process's id and does not return in time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def __call__(self, text, *, add_special_tokens):
        with Path(self._path).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(600)


def run_until_killed(model: str, path: str, pids: str) -> None:
    """Tokenize in two processes; called in a separate process."""
    tokens._WORTH_PROCESSES = 0
    source = DataSource.model_validate({"files": {"paths": [path]}})
    tokenized(Preparation(source, model, functools.partial(Waits, pids), workers=2))


@pytest.mark.slow
class TestProcesses:
    @pytest.fixture(autouse=True)
    def _use_processes(self, monkeypatch, rows: Path) -> None:
        monkeypatch.setattr(tokens, "_WORTH_PROCESSES", 0)
        # The processes have blocks of 2048 prompts.
        rows.write_text("\n".join(json.dumps({"prompt": "w " * (row % 11) + "w"}) for row in range(5000)))

    def test_processes_give_the_same_tokens_in_the_same_order(self, preparation: Preparation) -> None:
        without = dataclasses.replace(preparation, cache=TableCache())
        expected = tokenized(without)
        for workers in (2, 3):
            found = tokenized(dataclasses.replace(without, workers=workers))
            assert found.lengths.tolist() == expected.lengths.tolist() == [row % 11 + 3 for row in range(5000)]
            assert lists(found) == lists(expected)

    def test_a_bad_row_is_named_by_a_process_too(self, preparation: Preparation, rows: Path) -> None:
        with rows.open("a") as file:
            file.write('\n{"prompt": 3}')
        with pytest.raises(DataError, match="row 5000, column 'prompt'"):
            tokenized(dataclasses.replace(preparation, workers=2))

    def test_a_process_that_ends_is_named_with_the_remedy(self, preparation: Preparation) -> None:
        with pytest.raises(DataError, match=r"ended, often because memory ran out: .*lower trainer\.dataWorkers.* 2"):
            tokenized(dataclasses.replace(preparation, load_tokenizer=Ends, workers=2))

    def test_the_processes_end_with_their_parent(self, preparation: Preparation, rows: Path, tmp_path: Path) -> None:
        arguments = [preparation.model, str(rows), str(tmp_path / "pids")]
        program = f"from tests.unit.trainer.data.test_tokens import run_until_killed; run_until_killed(*{arguments})"
        parent = subprocess.Popen([sys.executable, "-c", program])
        found = _eventually(lambda: _pids(tmp_path / "pids", 2))
        parent.kill()
        parent.wait()
        assert _eventually(lambda: not any(map(_is_running, found)))


def _pids(path: Path, count: int) -> list[int]:
    found = [int(line) for line in path.read_text().split()] if path.exists() else []
    return found if len(found) >= count else []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _eventually(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.1)
    return found
