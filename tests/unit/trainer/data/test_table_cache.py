"""Tables in the storage: built once, never read in part, and in memory if the storage cannot be written."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ppojob_trainer.data import TableCache
from ppojob_trainer.storage_lock import LockTimes

FAST = LockTimes(beat=0.1, stale=30.0, poll=0.05)
OF_THE_DEAD = replace(FAST, stale=1.0)
"""For who waits for a process that was killed: nobody can be taken for dead by mistake."""
LIMIT_SECONDS = 60.0
SCHEMA = pa.schema([("number", pa.int64())])
KEY = {"numbers": 1}


class Numbers:
    """Two batches of numbers, and how often they were computed."""

    def __init__(self, may_end: Callable[[], bool] = lambda: True) -> None:
        self.built = 0
        self._may_end = may_end

    def __call__(self) -> Iterator[pa.RecordBatch]:
        self.built += 1
        for start in (0, 3):
            end = time.monotonic() + LIMIT_SECONDS
            while not self._may_end() and time.monotonic() < end:
                time.sleep(0.02)
            yield pa.record_batch([pa.array(range(start, start + 3))], schema=SCHEMA)


def numbers_in(cache: TableCache, build: Numbers, key=KEY) -> list[int]:
    return cache.table(key, "numbers", SCHEMA, build).rows.column("number").to_pylist()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_table_is_built_once(tmp_path: Path) -> None:
    build = Numbers()
    first, second = (numbers_in(TableCache(tmp_path, "job", FAST), build) for _ in range(2))
    assert first == second == list(range(6))
    assert build.built == 1
    assert [Path(name).suffix for name in files(tmp_path)] == [".arrow"]


def test_another_key_is_another_table(tmp_path: Path) -> None:
    build = Numbers()
    for key in (KEY, {"numbers": 2}):
        numbers_in(TableCache(tmp_path, "job", FAST), build, key)
    assert build.built == len(files(tmp_path)) == 2


def test_without_a_folder_tables_are_in_memory() -> None:
    found = TableCache().table(KEY, "numbers", SCHEMA, Numbers())
    assert (found.rows.num_rows, found.is_mapped) == (6, False)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array([1])], schema=SCHEMA)
        raise ValueError("row 1 is bad")

    with pytest.raises(ValueError, match="row 1 is bad"):
        TableCache(tmp_path, "job", FAST).table(KEY, "numbers", SCHEMA, fails)
    assert files(tmp_path) == []


def test_two_jobs_build_the_same_table_once(tmp_path: Path, caplog) -> None:
    def is_waited_for() -> bool:
        return ": waiting for job " in caplog.text

    builds, found = [Numbers(is_waited_for), Numbers(is_waited_for)], []

    def job(build: Numbers) -> None:
        found.append(numbers_in(TableCache(tmp_path, f"job {builds.index(build)}", FAST), build))

    with caplog.at_level(logging.INFO):
        jobs = [threading.Thread(target=job, args=(build,)) for build in builds]
        for each in jobs:
            each.start()
        for each in jobs:
            each.join()
    assert found == [list(range(6))] * 2
    assert sorted(build.built for build in builds) == [0, 1]
    # For a moment the lock may have no name in it yet; then the name is logged, once.
    assert caplog.text.count(": waiting for job ") == 1


BUILD_UNTIL_KILLED = """
import sys, time
from pathlib import Path
import pyarrow as pa
from ppojob_trainer.data import TableCache
from tests.unit.trainer.data.test_table_cache import FAST, KEY, SCHEMA

def batches():
    yield pa.record_batch([pa.array([-1])], schema=SCHEMA)
    print("halfway", flush=True)
    time.sleep(600)

TableCache(Path(sys.argv[1]), "job", FAST).table(KEY, "numbers", SCHEMA, batches)
"""


def test_a_killed_build_is_not_read_and_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD_UNTIL_KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "halfway\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert [name for name in files(tmp_path) if name.endswith(".incomplete")]

    assert numbers_in(TableCache(tmp_path, "job", OF_THE_DEAD), Numbers()) == list(range(6))
    assert [Path(name).suffix for name in files(tmp_path)] == [".arrow"]


def test_a_file_that_was_cut_is_built_again(tmp_path: Path, caplog) -> None:
    cache, build = TableCache(tmp_path, "job", FAST), Numbers()
    numbers_in(cache, build)
    [name] = files(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:100])
    assert numbers_in(cache, build) == list(range(6))
    assert build.built == 2
    assert "cannot be read and is built again" in caplog.text


@pytest.mark.parametrize("folder", ["/proc/ppojob", "FILE/cache"])
def test_a_folder_that_cannot_be_written_gives_a_warning(tmp_path: Path, folder: str, caplog) -> None:
    (tmp_path / "file").touch()
    cache = TableCache(Path(folder.replace("FILE", str(tmp_path / "file"))), "job", FAST)
    found = cache.table(KEY, "numbers", SCHEMA, Numbers())
    assert (found.rows.num_rows, found.is_mapped) == (6, False)
    assert "cannot be written, so the data is kept in memory and prepared at each start" in caplog.text


def test_a_full_storage_gives_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert numbers_in(TableCache(tmp_path, "job", FAST), Numbers()) == list(range(6))
    assert "No space left on device" in caplog.text
    assert files(tmp_path) == []
