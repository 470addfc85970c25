"""A line of the log says which job and attempt it is about, as text for people or as JSON for programs."""

import asyncio
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
import pytest
from kopf._cogs.clients import api, watching

from ppojob_operator import logs
from ppojob_operator.logs import JsonFormatter, LogFormat
from ppojob_operator.plan import JobKey


class Lines(logging.Handler):
    """Keeps each line as it would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.kept: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(json.loads(self.format(record)))


def record_at(seconds: float, message: str, logger: str = "kopf._cogs.clients.watching") -> logging.LogRecord:
    record = logging.LogRecord(logger, logging.ERROR, "", 0, message, None, None)
    record.created = seconds
    return record


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


def test_a_line_is_one_object_with_the_job_and_the_attempt(lines: Lines) -> None:
    with logs.about(JobKey("rl-team", "products")):
        logging.getLogger("a").info("before the attempt is known")
        logs.set_attempt(2)
        logging.getLogger("a").warning("two\nlines of %s", "words")
    logging.getLogger("b").error("about no job")

    assert [{name: line[name] for name in line if name != "time"} for line in lines.kept] == [
        {"level": "INFO", "logger": "a", "message": "before the attempt is known", "job": "rl-team/products"},
        {"level": "WARNING", "logger": "a", "message": "two\nlines of words", "job": "rl-team/products", "attempt": 2},
        {"level": "ERROR", "logger": "b", "message": "about no job"},
    ]


def test_an_error_has_its_traceback_in_the_same_line(lines: Lines) -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("a").exception("fault")

    assert str(lines.kept[0]["exception"]).endswith("ValueError: bad")


async def test_jobs_that_are_reconciled_at_the_same_time_are_distinguished(lines: Lines) -> None:
    async def look(name: str, attempt: int) -> None:
        with logs.about(name):
            logs.set_attempt(attempt)
            await asyncio.sleep(0.01)
            logging.getLogger("a").info("looked")

    await asyncio.gather(look("ns/one", 1), look("ns/two", 2))

    assert sorted((line["job"], line["attempt"]) for line in lines.kept) == [("ns/one", 1), ("ns/two", 2)]


@pytest.mark.parametrize(("form", "start"), [(LogFormat.JSON, '{"time": "'), (LogFormat.TEXT, "20")])
def test_both_forms_are_written(
    form: LogFormat, start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    logs.set_up("INFO", form)
    logging.getLogger("a").error("said")

    assert capsys.readouterr().err.startswith(start)


def test_failed_requests_of_kopf_are_one_line_per_minute_with_the_number_of_the_others() -> None:
    lines = logs.RetryFilter()

    def written(seconds: float, message: str) -> str | None:
        record = record_at(seconds, message)
        return record.getMessage() if lines.filter(record) else None

    assert [
        written(1000, "Request attempt #1/14 failed; will retry: GET /pods"),
        written(1000, "Request attempt #1/14 failed; will retry: GET /ppojobs"),
        written(1059, "Request attempt #5/14 failed; will retry: GET /pods"),
        written(1060, "Request attempt #6/14 failed; will retry: GET /pods"),
        written(1061, "Event processing has failed"),
        written(1120, "Request attempt #7/14 failed; will retry: GET /pods"),
    ] == [
        "Request attempt #1/14 failed; will retry: GET /pods",
        None,
        None,
        "Request attempt #6/14 failed; will retry: GET /pods (and 2 more before it)",
        "Event processing has failed",
        "Request attempt #7/14 failed; will retry: GET /pods",
    ]


def test_only_lines_of_kopf_are_left_out() -> None:
    lines = logs.RetryFilter()

    assert all(lines.filter(record_at(1000, "Request attempt 1 failed", "ppojob_operator.loop")) for _ in range(3))


async def test_kopf_words_its_lines_as_the_filter_expects(caplog: pytest.LogCaptureFixture) -> None:
    """With a real request of Kopf to a port that nobody listens on."""
    settings = kopf.OperatorSettings()
    settings.networking.error_backoffs = [0.0]
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        context: Any = SimpleNamespace(server="http://127.0.0.1:9", session=session)
        with pytest.raises(aiohttp.ClientConnectionError):
            await api.request(
                "GET", "/api", settings=settings, context=context, logger=logging.getLogger(watching.__name__)
            )

    lines = logs.RetryFilter()
    assert [lines.filter(record) for record in caplog.records] == [True, False]
