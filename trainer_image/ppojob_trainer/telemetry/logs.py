"""Logs of a process: one line format, and a copy of all output in a file of the job's storage.

Every role's process and the driver first call `tee_output`. The copy is made below Python, on the file descriptors, so
it includes the output of C++ libraries and child processes, and the last output of a process that crashes: a `tee`
child holds the other end of the pipe and outlives the process. If there are secrets to remove, `redaction` is that
child. Output to a terminal or to Ray's own log still goes there too.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ppojob_trainer.telemetry import redaction

_STDOUT, _STDERR = 1, 2
_DRAIN_TIMEOUT_S = 10.0


class OutputTee:
    """The copying of one process's output; `close` undoes it. Created by `tee_output`."""

    def __init__(self, path: Path, secrets: Sequence[str] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._command, self._environment = ["tee", "-a", str(path)], dict(os.environ)
        if secrets:
            self._command = [sys.executable, "-I", "-S", redaction.__file__, str(path)]
            self._environment[redaction.SECRETS_VARIABLE] = json.dumps(list(secrets))
        self._flush()
        self._saved = {fd: os.dup(fd) for fd in (_STDOUT, _STDERR)}
        self._copiers = [self._redirect(fd) for fd in (_STDOUT, _STDERR)]
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                # Python would write to a pipe in blocks, and a kill would lose the last one.
                stream.reconfigure(line_buffering=True)
        atexit.register(self.close)

    def close(self) -> None:
        """Flush, and restore the original destination of the output; calling it again does nothing."""
        if not self._saved:
            return
        self._flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        self._saved = {}
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        for copier in self._copiers:
            try:
                copier.wait(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                # A child process is still running and holds the pipe open.
                copier.terminate()
                copier.wait(timeout=_DRAIN_TIMEOUT_S)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _redirect(self, fd: int) -> subprocess.Popen[bytes]:
        """Replace `fd` by a pipe to the copier, which has a separate session so that Ctrl-C does not end it first."""
        read_end, write_end = os.pipe()
        copier = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=read_end,
            stdout=self._saved[fd],
            stderr=self._saved[_STDERR],
            start_new_session=True,
        )
        os.close(read_end)
        os.dup2(write_end, fd)
        os.close(write_end)
        return copier

    @staticmethod
    def _flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()


def tee_output(path: Path, secrets: Sequence[str] = ()) -> OutputTee:
    """Append everything that this process and its children print from now on to `path` too, in both without `secrets`.

    Raises:
        OSError: the folder cannot be created, or there is no `tee` program.
    """
    return OutputTee(path, secrets)


def configure_logging(level: int = logging.INFO) -> None:
    """Log to stderr, one line per message: time (UTC), level, logger, message. Replaces earlier handlers."""
    formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
