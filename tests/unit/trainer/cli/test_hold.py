"""The preStop hook holds a pod as long as a process of a run is on it, asks the run to stop, and else costs nothing."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.commands.hold import PROCESSES, hold
from ppojob_trainer.telemetry import RunFiles
from tests.bad_specs import GOOD

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
def sign(tmp_path: Path) -> Path:
    """The file that asks the driver to stop."""
    return RunFiles(tmp_path).leaving("good-1a2b3")


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


def test_a_pod_without_a_run_goes_at_once(job_file: Path, processes: Path, sign: Path) -> None:
    assert hold(job_file, 0, processes)
    assert not sign.exists()


@pytest.mark.parametrize("arguments", [DRIVER, WORKER], ids=["head", "worker"])
def test_a_run_is_asked_to_stop_and_waited_for(
    job_file: Path, processes: Path, sign: Path, arguments: list[str]
) -> None:
    process = add(processes, 77, arguments)

    def stop_in_order() -> None:
        while not sign.exists():
            time.sleep(0.01)
        process.unlink()

    run = threading.Thread(target=stop_in_order)
    run.start()
    assert hold(job_file, 60, processes)
    run.join()
    assert not sign.exists(), "nothing is left for a later attempt to find"


def test_a_driver_that_begins_only_now_is_asked_again(job_file: Path, processes: Path, sign: Path) -> None:
    process = add(processes, 77, DRIVER)

    def begin_late() -> None:
        for _ in range(2):
            while not sign.exists():
                time.sleep(0.01)
            sign.unlink()
        process.unlink()

    run = threading.Thread(target=begin_late)
    run.start()
    assert hold(job_file, 60, processes)
    run.join()


def test_a_run_that_does_not_end_is_waited_for_no_longer_than_the_limit(job_file: Path, processes: Path) -> None:
    add(processes, 77, WORKER)

    assert not hold(job_file, 0, processes)


def test_a_driver_that_does_not_answer_is_not_waited_for_to_the_limit(
    job_file: Path, processes: Path, tmp_path: Path
) -> None:
    add(processes, 77, DRIVER)

    assert not hold(job_file, 600, processes, unheard_s=0)

    heard = RunFiles(tmp_path).heard("good-1a2b3")
    heard.touch()
    begin = time.monotonic()
    assert not hold(job_file, 1.0, processes, unheard_s=0)
    assert time.monotonic() - begin >= 1.0, "one that has answered is given its time"


def test_a_pod_whose_ray_is_just_starting_is_held_until_it_can_be_ended(job_file: Path, processes: Path) -> None:
    status = processes / "1" / "status"
    status.write_text("Name:\tpython\nSigCgt:\t0000000000000002\n")

    def come_up() -> None:
        time.sleep(1.0)
        # At once, as the kernel shows it: a file that is being written is empty for a moment.
        new = status.with_name("new")
        new.write_text("Name:\tray\nSigCgt:\t0000000100004002\n")
        new.replace(status)

    start = threading.Thread(target=come_up)
    start.start()
    assert hold(job_file, 60, processes)
    assert "4002" in status.read_text(), "SIGTERM would have been lost"
    start.join()


def test_a_storage_that_fails_ends_no_hook(
    job_file: Path, processes: Path, sign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(processes, 77, DRIVER)
    # Neither root nor anybody else can write below a file.
    sign.parent.joinpath("job.json").write_text(job_file.read_text().replace(str(sign.parent), f"{job_file}/x"))

    assert not hold(job_file, 0, processes)
    assert "NotADirectoryError" in capsys.readouterr().err


def test_a_pod_is_held_too_where_the_run_cannot_be_asked(
    tmp_path: Path, processes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(processes, 77, WORKER)

    assert not hold(tmp_path / "missing.json", 0, processes)
    assert "the trainer cannot be told that this pod is leaving" in capsys.readouterr().err


def test_a_driver_is_found_among_the_processes_of_a_real_kernel(job_file: Path, sign: Path) -> None:
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program, "ppojob_trainer.main"], stdin=subprocess.PIPE) as process:
        while not (PROCESSES / str(process.pid) / "cmdline").read_bytes():
            time.sleep(0.01)  # The kernel starts a program before it can be seen which.
        assert not hold(job_file, 0.1, PROCESSES)
        process.kill()
    assert sign.exists()
