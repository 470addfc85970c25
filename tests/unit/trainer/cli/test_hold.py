"""The preStop hook delays a pod's deletion while a process of a run is on it, and requests the run to stop."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.commands.hold import PROCESSES, follow, hold
from ppojob_trainer.telemetry import RunFiles
from tests.bad_specs import GOOD
from tests.ports import server_port

DRIVER = ["python", "-m", "ppojob_trainer.main", "--job", "/etc/ppojob/job.json"]
WORKER = ["ray::WorkerProcess.execute", ""]


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "good-1a2b3")
    job = JobFile(namespace="n", name="good", uid="u", root=str(tmp_path), spec=resolve(parse_spec(GOOD["spec"])))
    path = tmp_path / "job.json"
    path.write_text(job.encode())
    return path


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    """The file that requests the driver to stop."""
    return RunFiles(tmp_path).terminating("good-1a2b3")


@pytest.fixture
def processes(tmp_path: Path) -> Path:
    """A folder of processes with those that every pod has."""
    folder = tmp_path / "proc"
    shell = ["/bin/sh", "-c", "python -m ppojob_trainer.main --job /etc/ppojob/job.json"]
    for number, arguments in enumerate((["ray::IDLE", ""], ["ray::JobSupervisor", ""], ["raylet"], shell, [""]), 1):
        add(folder, number, arguments)
    (folder / "self").mkdir()
    return folder


def add(folder: Path, number: int, arguments: list[str]) -> Path:
    """Add a process."""
    (folder / str(number)).mkdir(parents=True)
    (folder / str(number) / "cmdline").write_bytes("\0".join(arguments).encode())
    return folder / str(number) / "cmdline"


def test_a_pod_without_a_run_is_deleted_at_once(job_file: Path, processes: Path, request_file: Path) -> None:
    assert hold(job_file, 0, processes)
    assert not request_file.exists()


@pytest.mark.parametrize("arguments", [DRIVER, WORKER], ids=["head", "worker"])
def test_the_hook_requests_a_stop_and_waits(
    job_file: Path, processes: Path, request_file: Path, arguments: list[str]
) -> None:
    process = add(processes, 77, arguments)

    def stop_gracefully() -> None:
        while not request_file.exists():
            time.sleep(0.01)
        process.unlink()

    run = threading.Thread(target=stop_gracefully, daemon=True)
    run.start()
    assert hold(job_file, 60, processes)
    run.join()
    assert not request_file.exists(), "nothing is left for a later attempt to find"


def test_the_request_is_repeated_for_a_driver_that_starts_only_now(
    job_file: Path, processes: Path, request_file: Path
) -> None:
    process = add(processes, 77, DRIVER)

    def begin_late() -> None:
        for _ in range(2):
            while not request_file.exists():
                time.sleep(0.01)
            request_file.unlink()
        process.unlink()

    run = threading.Thread(target=begin_late, daemon=True)
    run.start()
    assert hold(job_file, 60, processes)
    run.join()


def test_the_hook_waits_no_longer_than_the_limit(job_file: Path, processes: Path) -> None:
    add(processes, 77, WORKER)

    assert not hold(job_file, 0, processes)


def test_the_hook_waits_less_for_a_driver_that_does_not_acknowledge(
    job_file: Path, processes: Path, tmp_path: Path
) -> None:
    add(processes, 77, DRIVER)

    assert not hold(job_file, 600, processes, acknowledge_s=0)

    acknowledgement = RunFiles(tmp_path).stop_acknowledged("good-1a2b3")
    acknowledgement.touch()
    begin = time.monotonic()
    assert not hold(job_file, 1.0, processes, acknowledge_s=0)
    assert time.monotonic() - begin >= 1.0, "a driver that has acknowledged gets the whole limit"


def test_workers_that_the_driver_has_left_to_the_next_attempt_hold_no_pod(
    job_file: Path, processes: Path, request_file: Path
) -> None:
    add(processes, 77, WORKER)
    files = RunFiles(request_file.parent)

    def stop_gracefully() -> None:
        while not request_file.exists():
            time.sleep(0.01)
        files.run_ended("good-1a2b3").touch()

    killed: list[tuple[int, int]] = []
    run = threading.Thread(target=stop_gracefully, daemon=True)
    run.start()
    assert hold(job_file, 60, processes, kill=lambda *which: killed.append(which))
    run.join()
    assert not request_file.exists()
    assert killed == [(77, signal.SIGKILL)], "Ray would wait for it"
    assert hold(job_file, 0, processes, kill=lambda *which: killed.append(which)), "it requests nothing later"
    assert follow(job_file, 0, processes)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where Ray's head accepts connections."""
    # Nobody else gets this port when it is closed.
    with socket.create_server(("127.0.0.1", server_port())) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        yield server


def test_workers_of_a_head_that_is_lost_hold_no_pod(job_file: Path, processes: Path, head: socket.socket) -> None:
    add(processes, 77, WORKER)
    killed: list[tuple[int, int]] = []

    def hold_for(limit_s: float) -> bool:
        return hold(job_file, limit_s, processes, head_lost_s=0.5, kill=lambda *which: killed.append(which))

    assert not hold_for(2.0), "the head answers"
    assert killed == []
    head.close()
    begin = time.monotonic()
    assert hold_for(60.0)
    assert time.monotonic() - begin >= 0.5
    assert killed == [(77, signal.SIGKILL)], "its GPU is for the next attempt"


def test_a_driver_that_acknowledges_is_waited_for_without_an_answer_of_the_head(
    job_file: Path, processes: Path, head: socket.socket, tmp_path: Path
) -> None:
    add(processes, 77, WORKER)
    RunFiles(tmp_path).stop_acknowledged("good-1a2b3").touch()
    head.close()

    assert not hold(job_file, 2.0, processes, head_lost_s=0.0)


def test_the_drivers_own_pod_is_held_without_an_answer_of_the_head(
    job_file: Path, processes: Path, head: socket.socket
) -> None:
    add(processes, 77, DRIVER)
    head.close()

    assert not hold(job_file, 2.0, processes, head_lost_s=0.0)


def test_a_driver_that_still_reports_its_end_holds_its_pod(job_file: Path, processes: Path, request_file: Path) -> None:
    add(processes, 77, DRIVER)
    RunFiles(request_file.parent).run_ended("good-1a2b3").touch()

    assert not hold(job_file, 0, processes)


def test_a_pod_whose_ray_is_starting_is_held_until_ray_handles_sigterm(job_file: Path, processes: Path) -> None:
    status = processes / "1" / "status"
    status.write_text("Name:\tpython\nSigCgt:\t0000000000000002\n")

    def come_up() -> None:
        time.sleep(1.0)
        # At once, as the kernel shows it: a file that is being written is empty for a moment.
        new = status.with_name("new")
        new.write_text("Name:\tray\nSigCgt:\t0000000100004002\n")
        new.replace(status)

    start = threading.Thread(target=come_up, daemon=True)
    start.start()
    assert hold(job_file, 60, processes)
    assert "4002" in status.read_text(), "SIGTERM would have been lost"
    start.join()


def test_the_hook_survives_a_failing_storage(
    job_file: Path, processes: Path, request_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(processes, 77, DRIVER)
    # Neither root nor anybody else can write below a file.
    request_file.parent.joinpath("job.json").write_text(
        job_file.read_text().replace(str(request_file.parent), f"{job_file}/x")
    )

    assert not hold(job_file, 0, processes)
    assert "NotADirectoryError" in capsys.readouterr().err


def test_the_hook_waits_even_if_it_cannot_request_the_stop(
    tmp_path: Path, processes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(processes, 77, WORKER)

    assert not hold(tmp_path / "missing.json", 0, processes)
    assert "cannot notify the trainer that this pod is being deleted" in capsys.readouterr().err


def test_a_driver_is_found_among_the_processes_of_a_real_kernel(job_file: Path, request_file: Path) -> None:
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program, "ppojob_trainer.main"], stdin=subprocess.PIPE) as process:
        while not (PROCESSES / str(process.pid) / "cmdline").read_bytes():
            time.sleep(0.01)  # The kernel starts a program before it can be seen which.
        assert not hold(job_file, 0.1, PROCESSES)
        process.kill()
    assert request_file.exists()


def test_a_pod_of_an_elastic_pool_requests_no_stop_and_is_deleted_soon(
    job_file: Path, processes: Path, request_file: Path
) -> None:
    add(processes, 77, WORKER)

    assert follow(job_file, 60, processes, others_s=0.1)

    assert not request_file.exists()


def test_a_pod_of_an_elastic_pool_stays_while_the_run_stops_because_all_its_pods_are_deleted(
    job_file: Path, processes: Path, request_file: Path
) -> None:
    process, ended = add(processes, 77, WORKER), threading.Event()
    request_file.parent.mkdir(parents=True, exist_ok=True)
    request_file.touch()

    def stop_gracefully() -> None:
        ended.wait(60)
        process.unlink()

    run = threading.Thread(target=stop_gracefully, daemon=True)
    run.start()
    threading.Timer(1.0, ended.set).start()
    assert follow(job_file, 60, processes, others_s=0.0)
    assert ended.is_set(), "not before the run has ended"
    run.join()
    process.write_bytes("\0".join(WORKER).encode())
    assert not follow(job_file, 0.1, processes, others_s=0.0), "a run that does not end"
