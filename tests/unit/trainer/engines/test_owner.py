"""vLLM's processes end with the process that started them. Real processes, without vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

START = "import os, subprocess, sys, time; print(os.getpid(), flush=True); "
PROGRAMS = {
    "owner": START + "subprocess.Popen([sys.executable, *sys.argv[1:], str(os.getpid())]); time.sleep(600)",
    "core": START + "subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(600)",
    "worker": "from ppojob_trainer.engines.rollout.owner import end_with; import sys; end_with(int(sys.argv[1])); "
    + START
    + "time.sleep(600)",
    # It waits for the memory of a GPU, and says so at its first poll.
    "waiting": "import os, sys, time, types; from ppojob_trainer.engines.rollout.options import GPU_FREE_FILE, OWNER; "
    "os.environ |= {OWNER: sys.argv[1], GPU_FREE_FILE: '/nowhere'}; said = []; "
    "from ppojob_trainer.engines.rollout import waiting_worker as module; "
    "say = lambda: said or said.append(print(os.getpid(), flush=True)); "
    "module.time = types.SimpleNamespace(sleep=lambda seconds: (say(), time.sleep(seconds))); "
    "module.WaitingWorker.__new__(module.WaitingWorker).init_device()",
}
"""Each starts the next one; the last argument is the owner's number."""


@pytest.mark.parametrize("last", ["worker", "waiting"])
@pytest.mark.parametrize("first", [["owner"], ["owner", "core"]], ids="-".join)
def test_they_end_when_it_is_killed(first: list[str], last: str, tmp_path: Path) -> None:
    chain = [*first, last]
    for name in chain:
        (tmp_path / name).write_text(PROGRAMS[name])
    command = [sys.executable, *(str(tmp_path / name) for name in chain)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        numbers = [int(owner.stdout.readline()) for _ in chain]
        others = [psutil.Process(number) for number in numbers if number != owner.pid]
        assert [process.is_running() for process in others] == [True] * (len(chain) - 1)
        owner.kill()
        _, left = psutil.wait_procs(others, timeout=60)
        for process in left:
            process.kill()
        assert left == []
