"""The failure of a cluster stage, with the log file that explains it. Every module here raises it."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 25


class ClusterError(RuntimeError):
    """A stage cannot go on: what is wrong, what to do, and (where there is one) the log file with its last lines."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        self.log = log
        super().__init__(message if log is None else f"{message}\nlog: {log}\n{tail(log)}")


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a log file, indented; says so if it cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"  (no log: {error.strerror})"
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:]) or "  (the log is empty)"
