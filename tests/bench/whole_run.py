"""One `ppojob run` as a process, to its end or to a step after which it is killed.

Called by `measurement`, `bench_checkpoint` and `bench_host_memory`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ppojob_trainer.telemetry.records import read_metrics

PROGRAM = "from ppojob_trainer.cli import main; main()"
RUN_LIMIT_S = 900.0
_POLL_S = 0.5


def run_job(
    job: Mapping[str, Any], folder: Path, output: Path, *, stop_after: int | None = None, limit_s: float = RUN_LIMIT_S
) -> int:
    """Write DIR/job.yaml, run it into `output` with its messages in DIR/log.txt, and return the exit status.

    Args:
        folder: DIR; it exists.
        stop_after: step after which the run is killed, before it saves a checkpoint; the status is then 0.

    Raises:
        subprocess.TimeoutExpired: it still runs after the limit.
    """
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(dict(job)), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, "run", str(file), "--output", str(output)]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return _wait(process, output, stop_after, limit_s)
        finally:
            _kill(process)


def steps_of(output: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of the steps that a run has recorded so far, by step."""
    return {int(row["step"] or 0): row for row in read_metrics(output / "metrics.jsonl")}


def _wait(process: subprocess.Popen[bytes], output: Path, stop_after: int | None, limit_s: float) -> int:
    if stop_after is None:
        return process.wait(limit_s)
    end = time.monotonic() + limit_s
    while process.poll() is None and stop_after not in steps_of(output):
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        time.sleep(_POLL_S)
    # A run that is to be killed has none yet.
    return process.returncode or 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs; Ray's processes end with it. A graceful stop would save."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
