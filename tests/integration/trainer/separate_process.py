"""Runs a module of the tests as a process of its own, because vLLM reads its environment at its import.

The module prints what it has seen with `print_seen`; `seen_by` returns it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S = 1500
"""Longest run of a module: several times what it takes, because builds and other tests run beside it."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_GIVEN = os.environ.get(VISIBLE_GPUS)
_PROJECT = Path(__file__).resolve().parents[3]
_SEEN = "SEEN "
_DUMP_LIMIT_SECONDS = 10.0
_NUM_SHOWN = 12_000


def seen_by(module: str, *arguments: str, limit: float) -> dict[str, Any]:
    """Run `python -m MODULE ARGUMENTS...` and return what it has printed.

    Raises:
        AssertionError: it failed, or ran longer than `limit` seconds; with the end of its output, and in the second
            case with the stacks of its threads.
    """
    command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        with output.open("w") as into, errors.open("w") as also:
            # A separate session: vLLM's processes are ended with it.
            process = subprocess.Popen(command, cwd=_PROJECT, stdout=into, stderr=also, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            _dump_stacks(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines, said = output.read_text(errors="replace").splitlines(), errors.read_text(errors="replace")
    reports = [line.removeprefix(_SEEN) for line in lines if line.startswith(_SEEN)]
    how = f"ran for {limit:g} s" if code is None else f"ended with {code}"
    if code != 0 or len(reports) != 1:
        raise AssertionError(f"{module} {how}:\n" + "\n".join([*lines[-40:], said[-_NUM_SHOWN:]]))
    found: dict[str, Any] = json.loads(reports[0])
    return found


def print_seen(seen: dict[str, Any]) -> None:
    """Print what `seen_by` returns."""
    print(_SEEN + json.dumps(seen), flush=True)


def gpu(index: int) -> str:
    """Return the name of one of the GPUs that this process was given, as CUDA_VISIBLE_DEVICES wants it."""
    return str(index) if _GIVEN is None else _GIVEN.split(",")[index].strip()


def _dump_stacks(process: subprocess.Popen[bytes]) -> None:
    """Let the process write the stacks of its threads; faulthandler does that, and the process ends."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DUMP_LIMIT_SECONDS)
