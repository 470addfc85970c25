"""The operator's log: text for people, or one JSON object a line, each with the job that the line is about.

`main.py` sets it up; the loop and the status server say whom they are about with `about`, and every line that is
written meanwhile has it, whoever writes it. It holds no secret: what may be logged is the writer's affair.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum

_JOB: ContextVar[str | None] = ContextVar("job", default=None)
_ATTEMPT: ContextVar[int | None] = ContextVar("attempt", default=None)
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFormat(StrEnum):
    """How a line is written."""

    TEXT = "Text"
    JSON = "JSON"


@contextlib.contextmanager
def about(job: object) -> Iterator[None]:
    """Let the lines that are written meanwhile be about a job; `str(job)` is `namespace/name`."""
    before, attempt = _JOB.set(str(job)), _ATTEMPT.set(None)
    try:
        yield
    finally:
        _ATTEMPT.reset(attempt)
        _JOB.reset(before)


def set_attempt(attempt: int | None) -> None:
    """Say which attempt of that job it is, as soon as it is known."""
    _ATTEMPT.set(attempt)


def set_up(level: str, form: LogFormat) -> None:
    """Write every log from this level on to the standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and job, attempt and exception where there are some."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "job": _JOB.get(),
            "attempt": _ATTEMPT.get(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}, ensure_ascii=False)
