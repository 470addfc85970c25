"""Shows where a process hangs: shortly before a phase's time limit, it writes all stacks to the process's log.

`observation` runs every call of a process under it. `faulthandler` writes the process's own threads; it runs no Python
code, so it works while the process hangs in C code. py-spy, if installed, writes the child processes (vLLM's engine).
The watchdog terminates nothing: the controller does.
"""

from __future__ import annotations

import faulthandler
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppojob_trainer.telemetry.current_phase import CurrentPhase

__all__ = ["watched"]

logger = logging.getLogger(__name__)

BEFORE_S = 30.0
"""Seconds before the limit; at most a tenth of the remaining time. The controller then terminates the process."""

_PY_SPY_TIMEOUT_S = 10.0
_OUTPUT_FD = 2


@contextmanager
def watched(who: str, method: str, phase: CurrentPhase | None) -> Iterator[None]:
    """Write all stacks if the block still runs shortly before the phase's limit."""
    if phase is None:
        yield
        return
    left = max(phase.deadline - time.time(), 0.1)
    after = left - min(BEFORE_S, left / 10)
    phase_of = f"phase {phase.phase} of step {phase.step}"
    text = f"{who} still runs {method}: {phase_of} reaches its limit in {left - after:.1f} s"
    timer = threading.Timer(after, _report, (text,))
    timer.daemon = True
    timer.start()
    # Use the file descriptor, because Python's streams may be replaced; the tee copies it to the log.
    faulthandler.dump_traceback_later(after + 0.1, file=_OUTPUT_FD)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _report(text: str) -> None:
    logger.error("%s; the stacks of its threads and child processes follow", text)
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return
    for child in _python_children():
        logger.error("child process %d:\n%s", child, _stacks_of(program, child))


def _stacks_of(program: str, process: int) -> str:
    command = [program, "dump", "--pid", str(process)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return found.stdout or found.stderr


def _python_children() -> list[int]:
    import psutil  # type: ignore[import-untyped]

    children = psutil.Process().children(recursive=True)
    # The `tee` children that copy our output are not Python.
    return [child.pid for child in children if child.is_running() and child.name() != "tee"]
