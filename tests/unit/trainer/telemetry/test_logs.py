"""All that a process prints is in its file and where it went before, also what it prints last."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def _run(path: Path, body: str, secrets: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    head = f"""
        import os, subprocess, sys, logging
        from pathlib import Path
        from ppojob_trainer.telemetry import configure_logging, tee_output
        tee = tee_output(Path({str(path)!r}), {list(secrets)!r})
    """
    program = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "body",
    [
        'print("words")',
        'os.write(1, b"words")',
        'subprocess.run(["echo", "words"], check=True)',
        'print("words", flush=False)\nsys.exit(3)',
        'print("words")\nos._exit(1)',
        'print("words")\nos.kill(os.getpid(), 9)',
        'print("words")\ntee.close()\ntee.close()',
    ],
    ids=["print", "below python", "a child", "exit", "hard exit", "killed", "closed twice"],
)
def test_output_is_in_both_places(tmp_path: Path, body: str) -> None:
    done = _run(tmp_path / "logs" / "driver.log", body)

    assert "words" in done.stdout
    assert "words" in (tmp_path / "logs" / "driver.log").read_text()


def test_errors_go_to_the_same_file_and_stay_errors(tmp_path: Path) -> None:
    done = _run(tmp_path / "x.log", 'print("out")\nraise RuntimeError("last words")')

    assert "last words" in done.stderr
    assert "last words" not in done.stdout
    text = (tmp_path / "x.log").read_text()
    assert "out" in text
    assert "RuntimeError: last words" in text


def test_a_crash_below_python_leaves_its_stack(tmp_path: Path) -> None:
    done = _run(tmp_path / "x.log", "import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)")

    assert done.returncode < 0
    assert "Segmentation fault" in (tmp_path / "x.log").read_text()


def test_after_closing_output_goes_where_it_went_before(tmp_path: Path) -> None:
    done = _run(tmp_path / "x.log", 'print("within")\ntee.close()\nprint("after")')

    assert done.stdout == "within\nafter\n"
    assert (tmp_path / "x.log").read_text() == "within\n"


def test_another_attempt_appends(tmp_path: Path) -> None:
    _run(tmp_path / "x.log", 'print("first")')
    _run(tmp_path / "x.log", 'print("second")')

    assert (tmp_path / "x.log").read_text() == "first\nsecond\n"


def test_a_secret_is_in_neither_place_whatever_prints_it(tmp_path: Path) -> None:
    body = """
        print("one hunter2.")
        os.write(2, b"two hunter2.")
        subprocess.run(["echo", "three hunter2."], check=True)
        os.kill(os.getpid(), 9)
    """
    done = _run(tmp_path / "x.log", textwrap.dedent(body), ("hunter2",))

    assert done.stdout == "one [redacted].\nthree [redacted].\n"
    assert done.stderr == "two [redacted]."
    assert "hunter2" not in (tmp_path / "x.log").read_text()


def test_nothing_is_left_running_when_a_child_lives_on(tmp_path: Path) -> None:
    body = """
        import ppojob_trainer.telemetry.logs as logs
        logs._DRAIN_TIMEOUT_S = 0.5
        child = subprocess.Popen(["sleep", "30"])
        tee.close()
        print([copier.poll() is not None for copier in tee._copiers])
        child.kill()
        child.wait()
    """
    done = _run(tmp_path / "x.log", textwrap.dedent(body))

    assert done.stdout == "[True, True]\n", done.stderr


def test_a_log_line_has_time_level_and_logger(tmp_path: Path) -> None:
    _run(tmp_path / "x.log", 'configure_logging()\nlogging.getLogger("a.b").warning("careful")')

    line = (tmp_path / "x.log").read_text()
    assert line.endswith("Z WARNING a.b: careful\n")
    assert line[4] == "-"
