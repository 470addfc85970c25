"""What the operator reads of an attempt: its exit code, and the last line of its log."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureRecord
from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.controller.loop import Outcome
from ppojob_trainer.main import __main__ as entrypoint
from ppojob_trainer.main.failures import JobFailedError, failure_record
from ppojob_trainer.telemetry import tee_output
from ppojob_trainer.worker_groups.errors import WorkerLostError

RAW: dict[str, Any] = {
    "image": "i",
    "model": {"actor": {"path": "/m"}},
    "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
    "reward": {"function": {"module": "r"}},
    "pools": [{"name": "actor", "gpusPerNode": 1}],
    "placement": {"actor": "actor"},
    "storage": {"claimName": "c"},
}


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep this process's output, logging and signals as they are."""
    monkeypatch.setattr(entrypoint, "tee_output", lambda path, secrets: None)
    monkeypatch.setattr(entrypoint, "configure_logging", lambda: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    job = JobFile(namespace="n", name="x", uid="u", root=str(tmp_path), spec=resolve(parse_spec(RAW)))
    path = tmp_path / "job.json"
    path.write_text(job.encode())
    return ["--job", str(path), "--hash", JobFile.digest(job.encode()), "--generation", "1", "--attempt", "2"]


def run_as(monkeypatch: pytest.MonkeyPatch, result: Outcome | Exception, sends: signal.Signals | None = None) -> None:
    def run_job(job: JobFile, *, attempt: int, stop: Any, has_successor: bool) -> Outcome:
        assert (job.name, attempt, has_successor) == ("x", 2, True)
        if sends is not None:
            signal.raise_signal(sends)
            assert stop.is_set()
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(entrypoint, "run_job", run_job)


def test_a_finished_run_ends_with_0_and_no_record(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run_as(monkeypatch, Outcome(8, is_finished=True))

    assert entrypoint.main(arguments) == 0
    assert FailureRecord.from_log(capfd.readouterr().out) is None


def test_a_failure_is_the_last_line(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    record = failure_record(WorkerLostError("actor rank 1 was lost during update_actor"))
    run_as(monkeypatch, JobFailedError(record))

    with caplog.at_level(logging.CRITICAL):
        code = entrypoint.main(arguments)

    last = capfd.readouterr().out.splitlines()[-1]
    assert code == 1
    assert FailureRecord.from_log(last) == record
    assert record.reason == Reason.WORKER_LOST


def test_it_comes_after_what_the_copiers_still_had_in_the_log_and_in_its_copy(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def print_much_and_fail(job: JobFile, *, attempt: int, stop: Any, has_successor: bool) -> Outcome:
        for stream in (1, 2):
            os.write(stream, b"from below Python\n" * 3000)
        raise WorkerLostError("actor rank 1 was lost during update_actor")

    monkeypatch.setattr(entrypoint, "tee_output", tee_output)
    monkeypatch.setattr(entrypoint, "run_job", print_much_and_fail)

    assert entrypoint.main(arguments) == 1

    copy = (tmp_path / "logs" / "attempt-2" / "driver.log").read_text()
    for log in (capfd.readouterr().out, copy):
        assert log.count("from below Python\n") >= 3000
        record = FailureRecord.from_log(log.splitlines()[-1])
        assert record is not None
        assert record.reason == Reason.WORKER_LOST


def test_neither_the_log_nor_the_record_has_a_secret_of_the_job(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def print_and_fail(job: JobFile, *, attempt: int, stop: Any, has_successor: bool) -> Outcome:
        os.write(1, b"logging in with hun")
        os.write(1, b"ter2-of-wandb\n")
        raise WorkerLostError("401 for hunter2-of-wandb")

    monkeypatch.setenv("WANDB_API_KEY", "hunter2-of-wandb")
    monkeypatch.setattr(entrypoint, "tee_output", tee_output)
    monkeypatch.setattr(entrypoint, "run_job", print_and_fail)

    assert entrypoint.main(arguments) == 1

    copy = (tmp_path / "logs" / "attempt-2" / "driver.log").read_text()
    captured = capfd.readouterr()
    for log in (captured.out, captured.err, copy):
        assert "hunter2" not in log
    assert "logging in with [redacted]\n" in captured.out
    record = FailureRecord.from_log(captured.out)
    assert record is not None
    assert "401 for [redacted]" in record.message


def test_a_storage_that_fails_does_not_hide_the_record(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    class Full:
        path = Path("/dev/full")

        def close(self) -> None:
            """Nothing was copied."""

    monkeypatch.setattr(entrypoint, "tee_output", lambda path, secrets: Full())
    run_as(monkeypatch, WorkerLostError("actor rank 1 was lost during update_actor"))

    assert entrypoint.main(arguments) == 1
    assert FailureRecord.from_log(capfd.readouterr().out.splitlines()[-1]) is not None


@pytest.mark.parametrize("sends", [signal.SIGTERM, signal.SIGINT, None], ids=["SIGTERM", "SIGINT", "operator"])
def test_a_graceful_stop_is_named_interrupted(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    capfd: pytest.CaptureFixture[str],
    sends: signal.Signals | None,
) -> None:
    """Ray takes an exit code of 0 for the end of all steps, also after a requested stop."""
    run_as(monkeypatch, Outcome(3, is_finished=False), sends)

    assert entrypoint.main(arguments) == 130
    record = FailureRecord.from_log(capfd.readouterr().out)
    assert record is not None
    assert (record.reason, record.exit_code) == (Reason.INTERRUPTED, 130)
    assert "after step 3" in record.message


def test_a_job_file_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entrypoint, "JOB_FILE_TIMEOUT_S", 0.1)
    arguments[3] = "0" * 64

    assert entrypoint.main(arguments) == 1
    record = FailureRecord.from_log(capfd.readouterr().out)
    assert record is not None
    assert record.reason == Reason.JOB_FILE_MISSING
