"""`make gpu`: GPUs are dealt to files, as many run beside each other as possible, and what cannot run is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.cluster.layout import PROJECT
from tools.suite import gpus
from tools.suite.gpus import LOGS, GpuPart, parts_of

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--num-gpus", type=int)
"""
TEST = """
import os, pathlib, time

def test_it():
    pathlib.Path("{name}.gpus").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    {body}
"""
WAIT = """
    end = time.monotonic() + 300
    while not pathlib.Path("{name}.gpus").exists():
        assert time.monotonic() < end, "{name} does not run"
        time.sleep(0.05)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Lines of the table are whole then.
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def part(project: Path, name: str, num_gpus: int, body: str = "pass") -> GpuPart:
    (project / f"test_{name}_on_cuda.py").write_text(TEST.format(name=name, body=body))
    return GpuPart(name, 500, f"test_{name}_on_cuda.py", num_gpus, num_tests=1)


def seen(project: Path, name: str) -> str:
    return (project / f"{name}.gpus").read_text()


def test_files_of_one_gpu_run_beside_each_other_on_different_ones(project: Path) -> None:
    # Each waits for the other one's file: one after the other, both would fail.
    parts = [part(project, "a", 1, WAIT.format(name="b")), part(project, "b", 1, WAIT.format(name="a"))]

    assert gpus.run(["3", "5"], parts, project) == 0
    assert {seen(project, "a"), seen(project, "b")} == {"3", "5"}


def test_a_file_of_two_gpus_has_them_for_itself(project: Path) -> None:
    alone = "assert not list(pathlib.Path('.').glob('busy*')); pathlib.Path('busy-{0}').touch(); time.sleep(0.5)"
    busy = f"{alone}; pathlib.Path('busy-{{0}}').unlink()"
    parts = [part(project, name, num_gpus, busy.format(name)) for name, num_gpus in (("a", 2), ("b", 2), ("c", 1))]

    assert gpus.run(["0", "1"], parts, project) == 0
    assert seen(project, "a") == seen(project, "b") == "0,1"


def test_a_file_that_fits_does_not_wait_for_one_that_needs_more_gpus(project: Path) -> None:
    parts = [
        part(project, "first", 1, WAIT.format(name="last")),
        part(project, "both", 2),
        part(project, "last", 1),
    ]

    assert gpus.run(["0", "1"], parts, project) == 0


def test_a_failed_file_fails_the_run_and_its_counts_are_in_the_table(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpus.run(["0"], [part(project, "a", 1, "assert not 'wrong sum'"), part(project, "b", 1)], project) == 1
    said = capsys.readouterr().out
    assert "wrong sum" in said
    assert "1 failed in" in said.split("started after")[1]
    assert "1 passed in" in said.split("started after")[1]
    assert "wrong sum" in (project / LOGS / "a.log").read_text()


def test_files_for_which_there_are_too_few_gpus_are_named_and_do_not_fail_the_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpus.run(["0"], [part(project, "a", 1), part(project, "four", 4)], project) == 0
    assert not (project / "four.gpus").exists()
    assert "needs 4 GPUs: 1 test" in capsys.readouterr().out


def test_a_run_in_which_nothing_could_run_has_not_passed(project: Path) -> None:
    assert gpus.run(["0"], [part(project, "four", 4)], project) == 1


def test_the_files_keep_their_order_and_those_of_fewer_gpus_come_first() -> None:
    counts = {("tests/gpu/test_z_on_cuda.py", 2): 3, ("tests/gpu/test_z_on_cuda.py", 1): 1, ("test_a_on_cuda.py", 1): 4}

    assert [(made.name, made.num_tests) for made in parts_of(counts)] == [("z-1", 1), ("a-1", 4), ("z-2", 3)]


@pytest.mark.slow
def test_the_tests_of_a_file_are_counted_by_the_gpus_that_they_need(capfd: pytest.CaptureFixture[str]) -> None:
    file = "tests/gpu/test_links_on_cuda.py"
    counted = gpus.in_another_process(gpus.collect, [file])

    assert counted == {(file, 1): 3, (file, 2): 6}
    assert "versions: Python" in capfd.readouterr().out


@pytest.mark.slow
def test_every_test_says_how_many_gpus_it_needs() -> None:
    counted = gpus.in_another_process(gpus.collect, [str(gpus.TESTS)])

    assert {Path(file).name for file, _ in counted} == {file.name for file in (PROJECT / gpus.TESTS).glob("test_*.py")}
    assert {num_gpus for _, num_gpus in counted} == {1, 2, 3, 4}


def test_an_interrupted_run_names_what_did_not_start(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus.GpuSuite, "run_part", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpus.run(["0"], [part(project, "a", 1), part(project, "b", 1)], project)
    assert "the run was ended" in capsys.readouterr().out.split("started after")[1]


def test_logs_of_earlier_runs_are_removed(project: Path) -> None:
    (project / LOGS).mkdir(parents=True)
    (project / LOGS / "earlier-1.log").touch()

    assert gpus.run(["0"], [part(project, "a", 1)], project) == 0
    assert [log.name for log in (project / LOGS).iterdir()] == ["a.log"]


@pytest.mark.parametrize(
    ("log", "details"),
    [
        ("== 3 passed, 6 deselected in 15.70s ==\n", "3 passed in 15.70s"),
        (
            "== 1 failed, 2 passed in 131.82s (0:02:11) ==\n[rank0]: a late line\n",
            "1 failed, 2 passed in 131.82s (0:02:11)",
        ),
        ("[/usr/lib] killed", ""),
        ("", ""),
    ],
)
def test_what_the_table_says_is_from_pytests_summary(project: Path, log: str, details: str) -> None:
    assert gpus.GpuSuite(project, [], LOGS).details(log) == details


@pytest.mark.parametrize(
    ("given", "num_gpus", "names"),
    [
        (None, 2, ["0", "1"]),
        ("2,3", 2, ["2", "3"]),
        ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"]),
        ("0,-1,1", 1, ["0"]),
        ("", 0, []),
    ],
)
def test_gpus_keep_the_names_that_the_user_gave(
    monkeypatch: pytest.MonkeyPatch, given: str | None, num_gpus: int, names: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    if given is not None:
        monkeypatch.setenv(gpus.VISIBLE, given)

    assert gpus.visible_gpus() == names


def test_a_single_test_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpus.main(["tests/gpu/test_links_on_cuda.py::test_a"]) == 1
    assert "name files, or run pytest" in capsys.readouterr().err


@pytest.mark.slow
def test_only_the_tests_of_a_number_of_gpus_are_left() -> None:
    file = "tests/gpu/test_links_on_cuda.py"

    assert gpus.in_another_process(gpus.collect, [file, "--num-gpus=2"]) == {(file, 2): 6}


@pytest.mark.slow
def test_a_file_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", two_gpus)

    assert gpus.main(["tests/gpu/test_nothing.py"]) == 1
    assert "pytest could not collect tests/gpu/test_nothing.py" in capfd.readouterr().err


def two_gpus() -> list[str]:
    return ["0", "1"]


@pytest.mark.slow
def test_a_machine_without_a_gpu_passes_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "")

    assert gpus.main(["tests/gpu/test_links_on_cuda.py"]) == 1
    assert "no GPU is visible" in capfd.readouterr().err
