"""A run whose pods, or whose PPOJob, are being deleted."""

import threading
from pathlib import Path

import pytest

from ppojob_trainer.main import monitor as monitor_module
from ppojob_trainer.main.monitor import JobDeletedError
from ppojob_trainer.telemetry import RunFiles
from tests.unit.trainer.main.monitors import FakeReporter, monitor_of, watched


async def test_a_pod_that_is_being_deleted_stops_the_run(
    tmp_path: Path, reporter: FakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "x-1a2b3")
    request_file = RunFiles(tmp_path).terminating("x-1a2b3")
    request_file.touch()
    monitor = monitor_of(tmp_path, threading.Event())

    monitor.start()
    assert not request_file.exists(), "the file of an earlier attempt is deleted"
    request_file.touch()
    await watched(monitor, lambda: monitor.is_stopping)

    assert monitor.is_stopping
    assert RunFiles(tmp_path).stop_acknowledged("x-1a2b3").exists(), "the hook sees the acknowledgement"
    monitor.note_end()
    assert RunFiles(tmp_path).run_ended("x-1a2b3").exists(), "the hook sees that the run has ended"
    monitor_of(tmp_path, threading.Event()).start()
    assert not RunFiles(tmp_path).run_ended("x-1a2b3").exists(), "the next attempt runs"


async def test_a_deleted_job_ends_at_once_when_its_pods_are_deleted(
    tmp_path: Path, reporter: FakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "x-1a2b3")
    monitor = monitor_of(tmp_path, threading.Event())
    monitor.start()
    RunFiles(tmp_path).terminating("x-1a2b3").touch()
    await watched(monitor, lambda: monitor.is_stopping)
    assert reporter.was_urgent, "the operator's answer says whether the job was deleted"

    reporter.is_job_deleted = True
    with pytest.raises(JobDeletedError, match="without a checkpoint"):
        await watched(monitor, lambda: False)

    monitor.close()
    assert not reporter.is_closed, "nobody waits for the last report"


async def test_a_deleted_job_whose_pods_are_kept_trains_on(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    reporter.is_job_deleted = True

    with pytest.raises(TimeoutError):
        await watched(monitor, lambda: monitor.is_stopping, timeout_s=0.6)


async def test_an_orphaned_run_saves_a_checkpoint_when_a_pod_of_it_is_drained(
    tmp_path: Path, reporter: FakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "x-1a2b3")
    monkeypatch.setattr(monitor_module, "_ORPHANED_AFTER_S", 0.5)
    monitor = monitor_of(tmp_path, threading.Event())
    monitor.start()
    reporter.is_job_deleted = True
    with pytest.raises(TimeoutError):
        await watched(monitor, lambda: monitor.is_stopping, timeout_s=1.2)
    RunFiles(tmp_path).terminating("x-1a2b3").touch()

    await watched(monitor, lambda: monitor.is_stopping)

    with pytest.raises(TimeoutError):
        await watched(monitor, lambda: False, timeout_s=0.6)


async def test_a_stopping_job_asks_again_when_its_pods_are_deleted(
    tmp_path: Path, reporter: FakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "x-1a2b3")
    stop = threading.Event()
    stop.set()
    monitor = monitor_of(tmp_path, stop)
    monitor.start()
    await watched(monitor, lambda: monitor.is_stopping)
    reporter.was_urgent = False
    RunFiles(tmp_path).terminating("x-1a2b3").touch()

    await watched(monitor, lambda: reporter.was_urgent)


async def test_a_job_that_another_one_has_replaced_leaves_nothing(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    reporter.is_job_deleted = True
    reporter.fenced_out.set()

    with pytest.raises(JobDeletedError):
        await watched(monitor, lambda: False)


async def test_a_storage_that_fails_stops_nothing(
    tmp_path: Path, reporter: FakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "x-1a2b3")
    monitor = monitor_of(tmp_path, threading.Event())

    def refuse(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(TimeoutError):
        await watched(monitor, lambda: monitor.is_stopping, timeout_s=1.5)


async def test_pods_of_another_ray_cluster_stop_nothing(
    tmp_path: Path, reporter: FakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "x-1a2b3")
    monitor = monitor_of(tmp_path, threading.Event())
    RunFiles(tmp_path).terminating("x-other").touch()

    with pytest.raises(TimeoutError):
        await watched(monitor, lambda: monitor.is_stopping, timeout_s=0.5)
