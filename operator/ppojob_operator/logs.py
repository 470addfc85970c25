"""The operator's log: text, or one JSON object per line with the job that the line is about.

`main.py` sets it up. The loop and the status server name the job with `about`; every line that is logged inside has it.
This module removes no secrets; callers must not log any.
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
_RETRIES = ("kopf.", "Request attempt ")
"""How the logger and the message of a line begin that Kopf writes for each failed request."""
_RETRY_SECONDS = 60.0


class LogFormat(StrEnum):
    """Format of a log line."""

    TEXT = "Text"
    JSON = "JSON"


@contextlib.contextmanager
def about(job: object) -> Iterator[None]:
    """Add a job to the lines that are logged inside; `str(job)` is `namespace/name`."""
    before, attempt = _JOB.set(str(job)), _ATTEMPT.set(None)
    try:
        yield
    finally:
        _ATTEMPT.reset(attempt)
        _JOB.reset(before)


def set_attempt(attempt: int | None) -> None:
    """Add the attempt to these lines, once it is known."""
    _ATTEMPT.set(attempt)


def set_up(level: str, form: LogFormat) -> None:
    """Log to the standard error from this level on."""
    handler = logging.StreamHandler()
    handler.addFilter(RetryFilter())
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler])


class RetryFilter(logging.Filter):
    """Passes at most one line per minute about a request of Kopf that failed, and counts the others in the next one.

    If the API server does not answer, Kopf writes a line for each retry of each of its four watches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._until = 0.0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        name, message = _RETRIES
        if not (record.name.startswith(name) and record.getMessage().startswith(message)):
            return True
        if record.created < self._until:
            self._left_out += 1
            return False
        if self._left_out:
            record.msg, record.args = f"{record.getMessage()} (and {self._left_out} more before it)", ()
        self._until, self._left_out = record.created + _RETRY_SECONDS, 0
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and job, attempt and exception if there are any."""

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
