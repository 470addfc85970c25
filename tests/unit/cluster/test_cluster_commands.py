"""Running programs and waiting: every limit holds, and every error says what happened."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tools.cluster.command import run, succeeds
from tools.cluster.errors import ClusterError, tail
from tools.cluster.processes import start_ticks
from tools.cluster.stages import StageFailed, Stages
from tools.cluster.waiting import wait_until


def test_run_returns_the_output_and_passes_input_and_environment() -> None:
    program = "import os, sys; print(sys.stdin.read() + os.environ['ADDED'])"
    assert run([sys.executable, "-c", program], limit=60, stdin="a", environment={"ADDED": "b"}) == "ab\n"


def test_a_failing_program_is_reported_with_what_it_said() -> None:
    with pytest.raises(ClusterError, match=r"exit code 3: .*\nwrong port"):
        run([sys.executable, "-c", "import sys; sys.stderr.write('wrong port'); sys.exit(3)"], limit=60)


def test_with_a_log_the_error_ends_with_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "build.log"
    with pytest.raises(ClusterError, match=r"log: .*build.log\n  \| line 1\n  \| line 2"):
        run([sys.executable, "-c", "print('line 1'); print('line 2'); raise SystemExit(1)"], limit=60, log=log)


def test_a_program_over_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = f"sleep 3600 & echo $! > {child}.new; mv {child}.new {child}; sleep 3600"
    # On a busy machine, the limit may come before the program has a child.
    for limit in (2, 20, 200):
        with pytest.raises(ClusterError, match=rf"ended after its limit of {limit} s"):
            run(["sh", "-c", program], limit=limit)
        if child.exists():
            break
    wait_until("the end of the child", lambda: str(start_ticks(int(child.read_text())) or ""), limit=120)


def test_a_process_that_is_asked_to_end_ends_its_program(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        "from tools.cluster.command import end_programs_on_sigterm, run; end_programs_on_sigterm(); "
        f"run(['sh', '-c', 'echo $$ > {child}.new; mv {child}.new {child}; exec sleep 3600'], limit=3600)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        wait_until("the child", lambda: "" if child.exists() else "its file", limit=120)
        process.terminate()

        assert process.wait(120) == 143
    wait_until("the end of the child", lambda: str(start_ticks(int(child.read_text())) or ""), limit=120)


def test_a_missing_program_is_an_error_and_no_success() -> None:
    with pytest.raises(ClusterError, match="cannot run no-such-program"):
        run(["no-such-program"], limit=60)
    assert not succeeds(["no-such-program"], limit=60)
    assert not succeeds(["false"], limit=60)
    assert succeeds(["true"], limit=60)


def test_waiting_ends_as_soon_as_nothing_is_missing() -> None:
    answers, start = iter(["the port", "the port", "", "it was asked once more"]), time.monotonic()
    waited = wait_until("the server", lambda: next(answers), limit=240, interval=0.01)
    assert 0.01 < waited <= time.monotonic() - start
    assert next(answers) == "it was asked once more"


def test_what_came_while_this_process_had_to_wait_is_seen_after_the_limit() -> None:
    answers = iter(["the port", ""])

    def missing() -> str:
        time.sleep(0.02)
        return next(answers)

    wait_until("the server", missing, limit=0.01, interval=0.01)


def test_waiting_says_what_was_still_missing(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("no space left\n")
    with pytest.raises(
        ClusterError, match=r"waited 0\.05 s for the server; still missing: its port\nlog: (.|\n)*no space"
    ):
        wait_until("the server", lambda: "its port", limit=0.05, interval=0.01, log=log)


def test_tail_shows_the_last_lines_and_survives_a_missing_file(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n".join(str(number) for number in range(100)))
    assert tail(log, lines=2) == "  | 98\n  | 99"
    assert tail(tmp_path / "none") == "  (no log: No such file or directory)"


def test_the_table_of_the_stages_keeps_names_whole_on_a_narrow_terminal() -> None:
    image = "registry.example/ppojob/trainer:" + "0123456789abcdef" * 3
    stages = Stages(Console(width=40, record=True, soft_wrap=True, highlight=False))
    with stages.stage("image trainer") as stage:
        stage.note = image
    with pytest.raises(StageFailed), stages.stage("the demo"):
        raise ClusterError("no")
    stages.console.export_text()

    stages.print_table()

    head, first, second = stages.console.export_text().splitlines()
    assert head.split() == ["stage", "result", "seconds", "note"]
    assert first.split()[:3] + first.split()[4:] == ["image", "trainer", "ok", image]
    assert second.split()[:3] == ["the", "demo", "failed"]
    assert first.index(image) == head.index("note")
