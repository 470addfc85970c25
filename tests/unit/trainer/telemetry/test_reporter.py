"""Progress reaches the endpoint; an endpoint that is unavailable or refuses reports never stops the training."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import Activity, Command, LiveSettings, ProgressReply, ProgressReport
from ppojob_api.v1alpha1.resolve import Reporting
from ppojob_trainer.telemetry import ProgressReporter
from ppojob_trainer.telemetry import reporter as reporter_module
from tests.contracts import messages, with_unknown_fields

Start = Callable[[Reporting], ProgressReporter]
Wait = Callable[[Callable[[], object], str], None]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is repeated because the machine is busy: the endpoint's reports are counted."""
    monkeypatch.setattr(reporter_module, "_REQUEST_TIMEOUT_S", 120.0)


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def begin(reporting: Reporting) -> ProgressReporter:
        reporter = ProgressReporter(reporting)
        reporter.start()
        started.append(reporter)
        return reporter

    yield begin
    for reporter in started:
        reporter.close(timeout_s=0.1)


def _report(step: int = 1) -> ProgressReport:
    return ProgressReport(uid="u", attempt=0, activity=Activity.TRAINING, step=step, total_steps=8, reward=0.5)


def test_a_report_arrives_with_the_token_and_in_camel_case(endpoint: Any, start: Start, wait_until: Wait) -> None:
    start(endpoint.reporting).update(_report(), now=True)

    wait_until(lambda: endpoint.reports, "the report")
    assert endpoint.tokens[0] == "Bearer first-token"
    assert endpoint.reports[0] == {
        "uid": "u",
        "attempt": 0,
        "number": 1,
        "activity": "Training",
        "step": 1,
        "totalSteps": 8,
        "phases": 0,
        "reward": 0.5,
        "metrics": {},
        "pools": [],
    }


def test_the_last_report_is_repeated_each_interval(endpoint: Any, start: Start, wait_until: Wait) -> None:
    start(endpoint.reporting).update(_report())

    wait_until(lambda: len(endpoint.reports) >= 3, "three reports at intervals of a second")


@pytest.mark.parametrize(("asked", "seconds"), [(None, 1), (5, 5), (3600, 30)])
def test_the_reply_asks_for_the_interval_within_bounds(
    endpoint: Any, start: Start, wait_until: Wait, monkeypatch: pytest.MonkeyPatch, asked: int | None, seconds: float
) -> None:
    endpoint.answer = ProgressReply(interval_seconds=asked).model_dump_json(by_alias=True)
    waits: list[float] = []
    wait_for = threading.Condition.wait_for

    def recorded(condition: threading.Condition, is_true: Callable[[], bool], timeout: float | None = None) -> bool:
        waits.append(timeout or 0.0)
        return wait_for(condition, is_true, timeout)

    monkeypatch.setattr(threading.Condition, "wait_for", recorded)
    reporter = start(endpoint.reporting)
    reporter.update(_report(), now=True)
    wait_until(lambda: endpoint.reports and reporter.reply.interval_seconds == asked, "the reply")

    wait_until(lambda: waits[-1] == seconds, f"a wait of {seconds} s")


def test_a_reply_never_shortens_the_interval(endpoint: Any, start: Start, wait_until: Wait) -> None:
    own = endpoint.reporting.model_copy(update={"interval_seconds": 60})
    endpoint.answer = ProgressReply(interval_seconds=1).model_dump_json(by_alias=True)
    reporter = start(own)
    reporter.update(_report(), now=True)
    wait_until(lambda: reporter.reply.interval_seconds == 1, "the reply")
    time.sleep(2.5)

    assert len(endpoint.reports) == 1


def test_every_report_has_a_different_number(endpoint: Any, start: Start, wait_until: Wait) -> None:
    start(endpoint.reporting).update(_report())

    wait_until(lambda: len(endpoint.reports) >= 3, "three reports")
    assert [report["number"] for report in endpoint.reports[:3]] == [1, 2, 3]


def test_the_token_is_read_again(endpoint: Any, start: Start, wait_until: Wait) -> None:
    reporter = start(endpoint.reporting)
    reporter.update(_report(), now=True)
    wait_until(lambda: endpoint.reports, "the first report")

    endpoint.token.write_text("second-token")
    reporter.update(_report(2), now=True)

    wait_until(lambda: endpoint.last_step == 2, "the second report")
    assert endpoint.tokens[-1] == "Bearer second-token"


def test_the_newest_reply_is_kept(endpoint: Any, start: Start, wait_until: Wait) -> None:
    settings = LiveSettings(total_steps=9, validate_every_steps=2, checkpoint_every_steps=3, checkpoint_keep=1)
    reporter = start(endpoint.reporting)
    assert reporter.reply.command is Command.NONE
    endpoint.answer = ProgressReply(command=Command.STOP, settings=settings).model_dump_json(by_alias=True)

    reporter.update(_report(), now=True)

    wait_until(lambda: reporter.reply.command is Command.STOP, "the reply")
    assert reporter.reply.settings == settings


@pytest.mark.parametrize(("place", "message"), messages("ProgressReply"))
@pytest.mark.parametrize("is_newer", [False, True])
def test_the_reply_of_another_operator_is_read(
    endpoint: Any, start: Start, wait_until: Wait, place: str, message: dict[str, Any], is_newer: bool
) -> None:
    known = ProgressReply.model_validate(message)
    # Without another interval than the default one, which is how the reply is recognised.
    known, message = known.model_copy(update={"interval_seconds": 7}), {**message, "intervalSeconds": 7}
    endpoint.answer = json.dumps(with_unknown_fields(message) if is_newer else message)
    reporter = start(endpoint.reporting)

    reporter.update(_report(), now=True)

    wait_until(lambda: reporter.reply == known, "the reply")


@pytest.mark.parametrize("status", [409, 410])
def test_an_attempt_that_is_fenced_out_learns_of_it(endpoint: Any, start: Start, wait_until: Wait, status: int) -> None:
    reporter = start(endpoint.reporting)
    endpoint.status = status

    reporter.update(_report(), now=True)

    assert reporter.fenced_out.wait(timeout=60)
    time.sleep(1.2)
    assert len(endpoint.reports) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_other_refusals_do_not_fence_out(endpoint: Any, start: Start, wait_until: Wait, status: int) -> None:
    reporter = start(endpoint.reporting)
    endpoint.status = status

    reporter.update(_report(), now=True)

    wait_until(lambda: len(endpoint.reports) >= 2, "the second try")
    assert not reporter.fenced_out.is_set()


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (404, '{"reason": "JobNotFound", "message": "there is no PPOJob n/x"}'),
        (409, '{"reason": "OtherObject", "message": "another one has its name"}'),
        (200, '{"command": "Stop", "isDeleted": true}'),
    ],
)
def test_the_deletion_of_the_job_is_in_the_answer(
    endpoint: Any, start: Start, wait_until: Wait, status: int, answer: str
) -> None:
    reporter = start(endpoint.reporting)
    endpoint.status, endpoint.answer = status, answer

    reporter.update(_report(), now=True)

    wait_until(lambda: reporter.is_job_deleted, "the deletion")


@pytest.mark.parametrize(
    ("status", "answer"), [(404, "Not Found"), (404, "[]"), (401, '{"reason": "Unauthenticated"}'), (200, "{}")]
)
def test_other_answers_say_nothing_of_a_deletion(
    endpoint: Any, start: Start, wait_until: Wait, status: int, answer: str
) -> None:
    reporter = start(endpoint.reporting)
    endpoint.status, endpoint.answer = status, answer

    reporter.update(_report(), now=True)

    wait_until(lambda: len(endpoint.reports) >= 2, "the second report")
    assert not reporter.is_job_deleted


def test_the_last_report_is_sent_at_once(endpoint: Any, start: Start) -> None:
    reporter = start(endpoint.reporting.model_copy(update={"interval_seconds": 600}))
    reporter.update(_report(8))

    assert reporter.close()
    assert endpoint.last_step == 8


def test_the_last_report_is_tried_again(endpoint: Any, start: Start, wait_until: Wait) -> None:
    endpoint.status = 503
    reporter = start(endpoint.reporting)
    reporter.update(_report(8), now=True)
    wait_until(lambda: endpoint.reports, "the first try")

    endpoint.status = 200

    assert reporter.close(timeout_s=120)


def test_a_report_that_has_arrived_is_not_sent_again_at_the_end(endpoint: Any, start: Start, wait_until: Wait) -> None:
    reporter = start(endpoint.reporting.model_copy(update={"interval_seconds": 600}))
    endpoint.answer = ProgressReply(interval_seconds=7).model_dump_json(by_alias=True)
    reporter.update(_report(8), now=True)
    wait_until(lambda: reporter.reply.interval_seconds == 7, "the reply")

    assert reporter.close()
    assert len(endpoint.reports) == 1


def test_a_slow_endpoint_does_not_hold_the_training(endpoint: Any, start: Start) -> None:
    endpoint.may_answer.clear()
    reporter = start(endpoint.reporting)

    for step in range(100):
        reporter.update(_report(step), now=True)

    assert endpoint.reports == [], "the endpoint has answered none of them"
    endpoint.may_answer.set()


def test_an_unavailable_endpoint_costs_one_line_in_the_log(
    endpoint: Any, start: Start, wait_until: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    # Taken, so that nobody else listens there.
    with socket.socket() as silent, caplog.at_level(logging.WARNING, logger="ppojob_trainer"):
        silent.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/x"
        reporter = start(endpoint.reporting.model_copy(update={"url": url}))
        reporter.update(_report(), now=True)
        wait_until(lambda: caplog.records, "the line")
        reporter.update(_report(2), now=True)
        assert not reporter.close(timeout_s=3)

    assert len(caplog.records) == 1
    assert "training continues: ConnectError" in caplog.text
    assert not reporter.fenced_out.is_set()


def test_another_authority_is_not_trusted(
    endpoint: Any, start: Start, tmp_path: Path, make_certificate: Callable[[Path, str], tuple[Path, Path]]
) -> None:
    other, _ = make_certificate(tmp_path, "other")
    reporter = start(endpoint.reporting.model_copy(update={"ca_path": str(other)}))
    reporter.update(_report())

    assert not reporter.close(timeout_s=1)
    assert endpoint.reports == []


def test_a_missing_token_does_not_stop_the_training(endpoint: Any, start: Start) -> None:
    endpoint.token.unlink()
    reporter = start(endpoint.reporting)
    reporter.update(_report())

    assert not reporter.close(timeout_s=1)


def test_without_a_report_nothing_is_sent(endpoint: Any, start: Start) -> None:
    reporter = start(endpoint.reporting)
    time.sleep(1.2)

    assert reporter.close()
    assert endpoint.reports == []
