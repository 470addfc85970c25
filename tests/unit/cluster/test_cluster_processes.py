"""Processes are found again and ended by id, and a stale record ends nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes, end, start_ticks

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


def wait_for_log(layout: Layout, name: str) -> None:
    deadline = time.monotonic() + 240
    while "up" not in layout.log(name).read_text():
        assert time.monotonic() < deadline, "the process did not come up in 240 s"
        time.sleep(0.02)


def test_a_started_process_is_found_by_another_command_and_ended(layout: Layout) -> None:
    pid = Processes(layout).start("sleeper", SLEEP).pid
    later = Processes(layout)
    assert later.recorded() == ["sleeper"]
    assert later.is_running("sleeper")
    assert later.stop("sleeper", limit=5) is True
    assert start_ticks(pid) is None
    assert later.recorded() == []
    assert later.stop("sleeper") is False


def test_it_has_a_separate_session_so_it_outlives_its_starter(layout: Layout) -> None:
    processes = Processes(layout)
    pid = processes.start("sleeper", SLEEP).pid
    assert os.getsid(pid) == pid != os.getsid(0)
    processes.stop("sleeper", limit=5)


def test_a_process_that_ignores_sigterm_is_killed(layout: Layout) -> None:
    processes = Processes(layout)
    pid = processes.start("deaf", DEAF).pid
    wait_for_log(layout, "deaf")
    assert processes.stop("deaf", limit=0.2) is True
    assert start_ticks(pid) is None


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot": "another boot"}])
def test_a_record_of_another_process_with_the_same_id_ends_nobody(layout: Layout, change: dict[str, object]) -> None:
    processes = Processes(layout)
    record = processes.start("sleeper", SLEEP)
    stale = replace(record, **change)  # type: ignore[arg-type]
    (layout.processes / "stale.json").write_text(json.dumps(asdict(stale)))
    assert not processes.is_running("stale")
    assert processes.stop("stale") is False
    assert processes.is_running("sleeper"), "the innocent process was ended"
    processes.stop("sleeper", limit=5)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_torn_record_counts_as_not_running(layout: Layout, text: str) -> None:
    layout.processes.mkdir(parents=True)
    (layout.processes / "torn.json").write_text(text)
    assert Processes(layout).record("torn") is None
    assert Processes(layout).stop("torn") is False
    assert Processes(layout).recorded() == []


def test_a_second_start_is_refused(layout: Layout) -> None:
    processes = Processes(layout)
    processes.start("sleeper", SLEEP)
    with pytest.raises(ClusterError, match="sleeper runs already"):
        processes.start("sleeper", SLEEP)
    processes.stop("sleeper", limit=5)


def test_an_ended_process_is_reported_with_the_end_of_its_log(layout: Layout) -> None:
    processes = Processes(layout)
    processes.start("short", [sys.executable, "-c", "import time; time.sleep(0.2); raise SystemExit('no port left')"])
    deadline = time.monotonic() + 240
    while processes.is_running("short"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(ClusterError, match=r"short has ended\nlog: .*short.log\n  \| no port left"):
        processes.require_running("short")


def test_a_missing_program_is_named(layout: Layout) -> None:
    with pytest.raises(ClusterError, match="cannot start x: No such file or directory: /no/such/program"):
        Processes(layout).start("x", ["/no/such/program"])


def test_end_leaves_a_process_alone_that_started_at_another_time() -> None:
    with subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL) as child:
        end(child.pid, ticks=1, limit=0.1)
        assert child.poll() is None
        child.kill()
