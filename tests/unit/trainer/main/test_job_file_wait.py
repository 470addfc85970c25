"""A mounted ConfigMap may be a minute old: the trainer waits for the file that its submission means."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.controller.layout import pools_of_roles
from ppojob_trainer.main.__main__ import wait_for_job
from ppojob_trainer.main.failures import JobFileMissingError
from ppojob_trainer.main.run import loop_settings

RAW: dict[str, Any] = {
    "image": "i",
    "model": {"actor": {"path": "/m"}},
    "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
    "reward": {"function": {"module": "r"}},
    "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
    "placement": {"actor": "actor", "critic": "critic"},
    "storage": {"claimName": "c"},
}


def job(name: str) -> JobFile:
    return JobFile(namespace="n", name=name, uid="u", root="/r", spec=resolve(parse_spec(RAW)))


def test_the_file_with_the_hash_is_taken_when_it_comes(tmp_path: Path) -> None:
    path, text = tmp_path / "job.json", job("new").encode()
    path.write_text(job("old").encode())

    def replace() -> None:
        time.sleep(0.3)
        path.write_text(text)

    thread = threading.Thread(target=replace)
    thread.start()
    found = wait_for_job(path, JobFile.digest(text), 240, threading.Event())
    thread.join()

    assert found == job("new")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_that_does_not_come_is_an_error_with_both_hashes(tmp_path: Path, is_there: bool) -> None:
    path, wanted = tmp_path / "job.json", JobFile.digest("other")
    if is_there:
        path.write_text(job("old").encode())

    with pytest.raises(JobFileMissingError, match=wanted) as raised:
        wait_for_job(path, wanted, 0.1, threading.Event())

    found = JobFile.digest(job("old").encode()) if is_there else "there is no such file"
    assert found in str(raised.value)


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    stop, start = threading.Event(), time.monotonic()
    stop.set()

    with pytest.raises(JobFileMissingError):
        wait_for_job(tmp_path / "job.json", "x", 500, stop)

    assert time.monotonic() - start < 250


def test_every_role_has_its_pool_and_the_data_the_first() -> None:
    assert pools_of_roles(job("x").spec) == {
        "data": "actor",
        "actor": "actor",
        "rollout": "actor",
        "critic": "critic",
        "reward": "critic",
    }


def test_the_loop_counts_the_gpus_of_all_pools() -> None:
    settings = loop_settings(job("x").spec, saves_in_background=False)

    assert (settings.num_gpus, settings.has_validation, settings.exports_final) == (3, False, True)
