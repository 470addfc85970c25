"""`make test`: two parts at a time, in their order; a failed build ends the run, nothing is left running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.cluster.layout import PROJECT, Layout
from tools.cluster.processes import end, start_ticks
from tools.cluster.waiting import wait_until
from tools.suite import targets
from tools.suite.parts import PartResult
from tools.suite.targets import CLUSTER_DOWN, LOGS, PARTS, Target

NAMES = [part.name for part in PARTS]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A layout without a cluster: the suite believes that it has to start one."""
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose targets only write down that they ran."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Makefile").write_text("".join(target(name) for name in [*NAMES, CLUSTER_DOWN.name]))
    return folder


def target(name: str, command: str = "@:") -> str:
    return f"{name}:\n\t@echo {name} >> ran\n\t{command}\n"


def replace_target(project: Path, name: str, command: str) -> None:
    makefile = project / "Makefile"
    makefile.write_text(makefile.read_text().replace(target(name), target(name, command)))


def ran(project: Path) -> list[str]:
    return (project / "ran").read_text().split()


def test_every_part_runs_once_and_the_cluster_that_was_started_is_taken_down(layout: Layout, project: Path) -> None:
    assert targets.run(layout, project) == 0
    assert sorted(ran(project)) == sorted([*NAMES, "cluster-down"])
    for part in PARTS:
        assert not part.after or ran(project).index(part.after) < ran(project).index(part.name)
    assert ran(project)[-1] == "cluster-down"


def test_a_cluster_that_ran_before_stays(layout: Layout, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_healthy", lambda _: True)
    assert targets.run(layout, project) == 0
    assert "cluster-down" not in ran(project)


def test_two_parts_run_beside_each_other(layout: Layout, project: Path) -> None:
    # Each waits for the other one's file: one after the other they would wait for ever.
    replace_target(project, "cluster-up", "@touch a; until [ -e b ]; do sleep 0.1; done")
    replace_target(project, "lint", "@touch b; until [ -e a ]; do sleep 0.1; done")
    assert targets.run(layout, project) == 0


def test_while_a_large_part_waits_for_another_small_ones_run(layout: Layout, project: Path) -> None:
    # When e2e could run, trainer runs, and waits for a part that comes after both.
    replace_target(project, "integration", "@until [ -e a ]; do sleep 0.1; done")
    replace_target(project, "trainer", "@touch a; until [ -e b ]; do sleep 0.1; done")
    replace_target(project, "unit-slow", "@touch b")
    assert targets.run(layout, project) == 0
    assert ran(project).index("trainer") < ran(project).index("unit-slow") < ran(project).index("e2e")


def test_parts_that_take_most_of_the_memory_run_one_after_the_other(layout: Layout, project: Path) -> None:
    for name in ("trainer", "e2e"):
        replace_target(project, name, "@mkdir large && sleep 0.5 && rmdir large")
    assert targets.run(layout, project) == 0


def test_a_failed_part_fails_the_run_and_does_not_stop_the_next(
    layout: Layout, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_target(project, "types", "@echo wrong type; exit 1")
    assert targets.run(layout, project) == 1
    assert sorted(ran(project)) == sorted([*NAMES, "cluster-down"])
    assert "wrong type\n" in (project / LOGS / "types.log").read_text()
    assert "wrong type\n" in capsys.readouterr().out


def test_what_two_parts_say_is_not_mixed(layout: Layout, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cluster-up", "lint"):
        replace_target(project, name, f"@for i in 1 2 3 4 5; do echo {name} $$i; sleep 0.1; done")
    assert targets.run(layout, project) == 0
    said = capsys.readouterr().out
    for name in ("cluster-up", "lint"):
        assert "".join(f"{name} {i}\n" for i in range(1, 6)) in said


@pytest.mark.parametrize("name", ["cluster-up", "images"])
def test_a_failed_build_ends_the_run_at_once(
    layout: Layout, project: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    replace_target(project, name, "@until [ -e lint-runs ]; do sleep 0.1; done; echo the disk is full; exit 1")
    # Without the end, it would have passed after ten minutes.
    replace_target(project, "lint", "@touch lint-runs; sleep 600")
    assert targets.run(layout, project) == 1
    said = capsys.readouterr().out
    assert "the disk is full" in said
    assert "make lint: ended with the run" in said
    assert "e2e" not in ran(project)
    assert ran(project)[-1] == "cluster-down"


def test_a_part_over_its_limit_is_ended(layout: Layout, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace_target(project, "lint", "@sleep 600")
    assert targets.run(layout, project, [Target("lint", 1), Target("types", 600, after="lint")]) == 1
    # Without a limit, it would have passed after ten minutes.
    assert "ended after its limit of 1 s" in capsys.readouterr().out
    # On a busy machine, the limit may come before the target writes that it runs.
    assert [name for name in ran(project) if name != "lint"] == ["types", "cluster-down"]


def leave_running(project: Path, name: str) -> None:
    # A separate session, as Ray's daemons have: ending the part's process group would miss it.
    # The part ends when the program that it leaves is `sleep`, no longer the shell that starts it.
    start = "setsid --fork sh -c 'echo $$$$ > pid; exec sleep 3661'"
    is_sleep = '[ "$$(cat /proc/$$(cat pid)/comm)" = sleep ]'
    replace_target(project, name, f"@{start}; until {is_sleep}; do sleep 0.1; done 2>/dev/null")


def test_what_a_part_leaves_running_is_ended(layout: Layout, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_running(project, "unit")
    assert targets.run(layout, project) == 0
    assert start_ticks(int((project / "pid").read_text())) is None
    assert "left running by unit, and ended: sleep 3661" in capsys.readouterr().out


def test_what_has_given_itself_a_title_is_ended_too(
    layout: Layout, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As vLLM's processes do: the title overwrites the environment, by which a process that was left is found."""
    write = "open('pid', 'w').write(str(os.getpid()))"
    title = f"import os, setproctitle, time; setproctitle.setproctitle('title ' * 99); {write}; time.sleep(600)"
    start = f'setsid --fork {sys.executable} -c "{title}"'
    replace_target(project, "unit", f"@{start}; until [ -s pid ]; do sleep 0.1; done")

    assert targets.run(layout, project) == 0
    assert start_ticks(int((project / "pid").read_text())) is None
    assert "left running by unit, and ended: title" in capsys.readouterr().out


def test_details_of_a_log_are_no_markup(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = targets._Targets(project, [], LOGS)
    suite.results.append(PartResult("unit", "failed", 0, 1, "[/usr/lib] killed"))
    suite.print_table()

    assert "[/usr/lib] killed" in capsys.readouterr().out


def both_run(project: Path) -> bool:
    return (project / "ran").exists() and {"lint", "types"} <= set(ran(project))


TERMINATED = """
import pathlib, sys
from tools.cluster.layout import Layout
from tools.suite.signals import end_parts_at_sigterm
from tools.suite.targets import Target, run
folder = pathlib.Path(sys.argv[1])
end_parts_at_sigterm()
layout = Layout(cache=folder / "cache", state=folder / "state", runtime=folder / "run")
run(layout, folder / "project", [Target("lint", 600), Target("types", 600), Target("unit", 600)])
"""


def test_sigterm_ends_the_run_also_if_it_comes_several_times(project: Path) -> None:
    replace_target(project, "lint", "@sleep 600")
    replace_target(project, "types", "@sleep 600")
    replace_target(project, "cluster-down", "@sleep 1; echo done >> ran")
    command = [sys.executable, "-c", TERMINATED, str(project.parent)]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until("two parts", lambda: "" if both_run(project) else "a part", limit=240)
        for _ in range(20):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode != 0
    assert ran(project)[2:] == ["cluster-down", "done"]
    assert all(f"make {name}: ended with the run" in said for name in ("lint", "types"))


def test_the_cluster_that_a_part_starts_keeps_running(layout: Layout, project: Path) -> None:
    leave_running(project, "cluster-up")
    assert targets.run(layout, project) == 0
    pid = int((project / "pid").read_text())
    ticks = start_ticks(pid)
    assert ticks is not None
    end(pid, ticks, limit=60)


def test_every_part_is_a_target_of_the_makefile() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    assert [name for name in [*NAMES, CLUSTER_DOWN.name] if f"\n.PHONY: {name}\n" not in makefile] == []
