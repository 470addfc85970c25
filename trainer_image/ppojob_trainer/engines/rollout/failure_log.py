"""Reads in vLLM's log why it failed.

vLLM's own processes log their errors; its caller often receives only that they ended ("Engine core initialization
failed. See root cause above. Failed core proc(s): {}"). Called by the rollout role, and on an engine's other nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ppojob_trainer.engines.errors import (
    EngineArgumentError,
    RolloutError,
    RolloutHostMemoryError,
    RolloutMemoryError,
)

__all__ = ["end_of", "explain", "explained", "memory_shortage"]

_LITTLE_MEMORY = re.compile(r"out of memory|is less than desired GPU memory utilization", re.IGNORECASE)
_LITTLE_HOST_MEMORY = re.compile(r"Available memory on node \S+ \([^)]*\)[^(]* is less than [^(]*\([^)]*\)")
# Ray's name of the worker, the name of vLLM's process, and what its logger puts before each line.
_PREFIX = re.compile(r"^(\([^()]*pid=\d+[^()]*\) *)*([A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\] ?)?")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Za-z_]\w*): *(.*)$|^([A-Za-z_][\w.]*(?:Error|Exception))$")
# What a process of vLLM's raises because another one failed, in place of that one's error.
_POINTER = re.compile(
    r"Engine core (?:proc )?initialization failed\. See root cause above\.(?: Failed core proc\(s\): \{[^}]*\})?"
    r"|WorkerProc initialization failed due to an exception in a background process\."
    r" See stack trace for root cause\."
    r"|EngineCore encountered an issue\. See stack trace \(above\) for the root cause\."
)
_END_OF_LOG = 100_000


def memory_shortage(text: str) -> str | None:
    """Return the last sentence in which vLLM reports too little memory on its GPU, or None."""
    found = [line for line in text.splitlines() if _LITTLE_MEMORY.search(line)]
    if not found:
        return None
    line = _PREFIX.sub("", found[-1]).strip()
    # Without the error's class.
    return re.sub(r"^[\w.]*(Error|Exception): *", "", line)


def explain(message: str, log: str) -> str:
    """Return vLLM's message with the root cause from its log where the message only points to the log.

    Of chained errors the first is the cause: `ModuleNotFoundError: No module named 'torchvision'`.
    """
    if not _POINTER.search(message):
        return message
    causes = [
        next((error for error in chain if not _POINTER.search(error)), None) for chain in _chains(log.splitlines())
    ]
    found = [cause for cause in causes if cause is not None]
    return _POINTER.sub(lambda _: found[-1], message) if found else message


def explained(error: Exception, log_file: Path) -> Exception:
    """Return an engine's failure with its cause, which vLLM often writes only into its log."""
    if not isinstance(error, RolloutError) or isinstance(error, EngineArgumentError):
        return error
    log = end_of(log_file)
    shortage = memory_shortage(str(error)) or memory_shortage(log)
    if shortage is not None:
        return RolloutMemoryError(shortage)
    if host_shortage := _LITTLE_HOST_MEMORY.search(f"{error}\n{log}"):
        return RolloutHostMemoryError(host_shortage[0])
    found = type(error)(explain(str(error), log))
    # The node of a failed worker.
    vars(found).update(vars(error))
    return found


def _chains(lines: list[str]) -> Iterator[list[str]]:
    """Yield the errors of each traceback, the cause first; chained tracebacks are one."""
    chain: list[str] = []
    is_in_traceback = is_chained = False
    for line in (_PREFIX.sub("", each) for each in lines):
        if line.startswith(_TRACEBACK):
            if chain and not is_chained:
                yield chain
                chain = []
            is_in_traceback, is_chained = True, False
        elif line.startswith(_CHAINED):
            is_chained = True
        elif is_in_traceback and line and not line[0].isspace() and _ERROR.match(line):
            # The frames are indented; the error is not.
            chain.append(_without_module(line))
            is_in_traceback = False
    if chain:
        yield chain


def _without_module(line: str) -> str:
    """Return `Class: message` without the module of the class."""
    name, separator, message = line.partition(":")
    return f"{name.rpartition('.')[2]}{separator}{message}".strip()


def end_of(file: Path) -> str:
    """Return the end of a log; empty where it cannot be read."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - _END_OF_LOG))
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
