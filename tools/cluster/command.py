"""Running one program to its end, with a limit and an error that shows its output."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tools.cluster.errors import ClusterError

SHOWN_CHARACTERS = 4000


def run(
    arguments: Sequence[str | Path],
    *,
    limit: float,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log: Path | None = None,
) -> str:
    """Run a program and return its standard output.

    `environment` is added to this process's own. With `log`, standard error (and output, which is then returned as
    "") goes to that file.

    Raises:
        ClusterError: the program is missing, fails, or runs longer than `limit` seconds (its process group is ended).
    """
    shown = shlex.join(str(argument) for argument in arguments)
    if log is None:
        return _run(arguments, shown, limit, stdin, environment, folder, None)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        return _run(arguments, shown, limit, stdin, environment, folder, file)


def end_programs_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does: with it end the programs that `run` waits for."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def succeeds(arguments: Sequence[str | Path], *, limit: float) -> bool:
    """True if the program ends with 0 within the limit."""
    try:
        run(arguments, limit=limit)
    except ClusterError:
        return False
    return True


def _run(
    arguments: Sequence[str | Path],
    shown: str,
    limit: float,
    stdin: str | None,
    environment: Mapping[str, str] | None,
    folder: Path | None,
    log: IO[str] | None,
) -> str:
    path = Path(log.name) if log else None
    try:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=log or subprocess.PIPE,
            stderr=log or subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise ClusterError(f"cannot run {arguments[0]}: {error.strerror}") from error
    try:
        output, error_output = process.communicate(stdin, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"ended after its limit of {limit:g} s: {shown[:SHOWN_CHARACTERS]}", path) from error
    finally:
        # One that has ended is left alone: its id may be another's by now.
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
    if process.returncode != 0:
        said = (error_output or output or "").strip()[-SHOWN_CHARACTERS:]
        raise ClusterError(f"exit code {process.returncode}: {shown[:SHOWN_CHARACTERS]}\n{said}", path)
    return output or ""
