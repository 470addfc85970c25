"""`make test`: all parts run in order, a failed background build ends the run, nothing is left running."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools.cluster import suite
from tools.cluster.layout import Layout
from tools.cluster.processes import start_ticks

PARTS = [*suite.QUICK_PARTS, *suite.CLUSTER_PARTS]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A layout without a cluster: the suite believes that it has to start one."""
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose targets only write down that they ran."""
    folder = tmp_path / "project"
    folder.mkdir()
    names = [*PARTS, "cluster-up", "images", "cluster-down"]
    (folder / "Makefile").write_text("".join(f"{name}:\n\t@echo {name} >> ran\n" for name in names))
    return folder


def replace_target(project: Path, name: str, command: str) -> None:
    makefile = project / "Makefile"
    makefile.write_text(makefile.read_text().replace(f"{name}:\n\t@echo {name} >> ran\n", f"{name}:\n\t{command}\n"))


def ran(project: Path) -> list[str]:
    return (project / "ran").read_text().split()


def test_every_part_runs_and_the_cluster_that_was_started_is_taken_down(layout: Layout, project: Path) -> None:
    assert suite.run(layout, project) == 0
    assert [name for name in ran(project) if name in PARTS] == PARTS
    assert ran(project)[-1] == "cluster-down"


def test_a_failed_part_fails_the_run_and_does_not_stop_the_next(layout: Layout, project: Path) -> None:
    replace_target(project, "types", "@exit 1")
    assert suite.run(layout, project) == 1
    assert [name for name in ran(project) if name in PARTS] == [name for name in PARTS if name != "types"]


def test_a_failed_background_build_ends_the_run_at_once(
    layout: Layout, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_target(project, "images", "@echo the disk is full; exit 1")
    replace_target(project, "unit", "@sleep 60")
    start = time.monotonic()
    assert suite.run(layout, project) == 1
    assert time.monotonic() - start < 50
    assert "the disk is full" in capsys.readouterr().out
    assert "e2e" not in ran(project)
    assert ran(project)[-1] == "cluster-down"


def test_a_part_over_its_limit_is_ended(layout: Layout, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.QUICK_PARTS, "lint", 0.5)
    replace_target(project, "lint", "@sleep 60")
    start = time.monotonic()
    assert suite.run(layout, project) == 1
    assert time.monotonic() - start < 50


def test_what_a_part_leaves_running_is_ended(layout: Layout, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A session of its own, as Ray's daemons have: ending the part's process group would miss it.
    replace_target(
        project, "unit", "@setsid --fork sh -c 'echo $$$$ > pid; exec sleep 61'; while [ ! -s pid ]; do :; done"
    )
    assert suite.run(layout, project) == 0
    assert start_ticks(int((project / "pid").read_text())) is None
    assert "left running by unit, and ended: " in capsys.readouterr().out
