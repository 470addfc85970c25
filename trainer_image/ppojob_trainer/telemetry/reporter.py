"""Sends the progress to the operator's status endpoint, from a separate thread.

The trainer's loop, or the fetch of models and data, passes the newest report and reads the newest reply; neither waits
for the network. An unavailable endpoint costs one log line a minute and nothing else. The reporter repeats only the
last report that it was given.
"""

import logging
import math
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError
from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type, wait_random_exponential

from ppojob_api.v1alpha1.progress import MAX_REPORT_INTERVAL_SECONDS, FetchReport, ProgressReply, ProgressReport
from ppojob_api.v1alpha1.resolve import Reporting

_log = logging.getLogger(__name__)
_FENCED_OUT = {409: "a newer attempt runs", 410: "the PPOJob is gone"}
_DELETED = ("JobNotFound", "OtherObject")
"""Reasons of the operator's refusals if the PPOJob does not exist, or another one has its name."""
_REQUEST_TIMEOUT_S = 10.0
_SECONDS_BETWEEN_COMPLAINTS = 60.0

Report = ProgressReport | FetchReport


class _NotDeliveredError(Exception):
    """The report did not arrive; it can be retried."""


class ProgressReporter:
    """Delivers the newest report at least once in an interval, and keeps the newest reply, which may change that."""

    def __init__(self, reporting: Reporting) -> None:
        self.fenced_out = threading.Event()
        """Set once the operator answered that a newer attempt replaced this one: stop at once, save nothing."""
        self._is_deleted = False
        self._reporting = reporting
        self._changed = threading.Condition()
        self._report: Report | None = None
        self._delivered: Report | None = None
        self._reply = ProgressReply()
        self._is_urgent = False
        self._num_sent = 0
        self._closes_at: float | None = None
        self._complained_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="progress-reporter", daemon=True)

    @property
    def reply(self) -> ProgressReply:
        """The newest answer: a command, and the settings that may change while the job runs."""
        with self._changed:
            return self._reply

    @property
    def is_job_deleted(self) -> bool:
        """Whether the PPOJob was deleted, or is being deleted, by the newest answer."""
        with self._changed:
            return self._is_deleted

    def start(self) -> None:
        """Start to send."""
        self._thread.start()

    def update(self, report: Report, *, now: bool = False) -> None:
        """Replace the last report by `report`; with `now` it is sent at once, not at the next interval."""
        with self._changed:
            self._report, self._is_urgent = report, self._is_urgent or now
            self._changed.notify()

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Send the last report at once, and retry until `timeout_s` is over. Return whether it arrived."""
        with self._changed:
            self._closes_at = time.monotonic() + timeout_s
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=timeout_s + _REQUEST_TIMEOUT_S)
        return self._delivered is self._report

    def _run(self) -> None:
        is_closing = False
        while not is_closing and not self.fenced_out.is_set():
            with self._changed:
                self._changed.wait_for(self._is_due_at_once, timeout=self._interval_s())
                self._is_urgent, is_closing = False, self._closes_at is not None
                is_needed = self._report is not None and not (is_closing and self._delivered is self._report)
            if is_needed:
                self._deliver()

    def _interval_s(self) -> float:
        """Return the longest time between two reports: what the operator asks for, within bounds."""
        own, asked = self._reporting.interval_seconds, self._reply.interval_seconds
        return own if asked is None else max(own, min(asked, MAX_REPORT_INTERVAL_SECONDS))

    def _is_due_at_once(self) -> bool:
        return self._is_urgent or self._closes_at is not None

    def _deliver(self) -> None:
        """Try until the newest report arrived, or until the next one is due."""
        retrying = Retrying(
            retry=retry_if_exception_type(_NotDeliveredError),
            wait=wait_random_exponential(multiplier=1.0, max=5.0),
            stop=self._has_tried_enough,
            sleep=self._pause,
        )
        try:
            retrying(self._post)
        except RetryError as error:
            self._complain(error.last_attempt.exception())
        except Exception as error:  # noqa: BLE001 - the end of this thread would look like a stalled training
            self._complain(error)

    def _has_tried_enough(self, state: RetryCallState) -> bool:
        if self._closes_at is not None:
            return time.monotonic() >= self._closes_at
        return (state.seconds_since_start or 0.0) >= self._interval_s()

    def _pause(self, seconds: float) -> None:
        """Wait between two tries; `close` ends the wait."""
        with self._changed:
            before = self._closes_at
            self._changed.wait_for(lambda: self._closes_at != before, timeout=seconds)

    def _post(self) -> None:
        """Send the newest report.

        Raises:
            _NotDeliveredError: the endpoint was unavailable, or did not accept the report.
        """
        with self._changed:
            report = self._report
        if report is None:
            return
        self._num_sent += 1
        numbered = report.model_copy(update={"number": self._num_sent})
        try:
            # Token and authority are renewed while the job runs, so both are read each time.
            token = Path(self._reporting.token_path).read_text().strip()
            with httpx.Client(verify=self._authority(), timeout=_REQUEST_TIMEOUT_S, trust_env=False) as client:
                answer = client.post(
                    self._reporting.url,
                    content=numbered.model_dump_json(by_alias=True, exclude_none=True),
                    headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                )
        except (OSError, httpx.HTTPError) as error:
            raise _NotDeliveredError(f"{type(error).__name__}: {error}") from error
        self._take(answer, report)

    def _authority(self) -> ssl.SSLContext | bool:
        """Trust the endpoint's own authority and no other; plain HTTP (tests) has none to trust."""
        if urlsplit(self._reporting.url).scheme != "https":
            return False
        return ssl.create_default_context(cafile=self._reporting.ca_path)

    def _take(self, answer: httpx.Response, report: Report) -> None:
        if not answer.is_success and _reason(answer) in _DELETED:
            with self._changed:
                self._is_deleted = True
        if answer.status_code in _FENCED_OUT:
            _log.error("fenced out: %s (%s %s)", _FENCED_OUT[answer.status_code], answer.status_code, answer.text[:500])
            self.fenced_out.set()
            return
        if not answer.is_success:
            raise _NotDeliveredError(f"the endpoint answered {answer.status_code}: {answer.text[:500]}")
        try:
            # A newer operator may say more, in the settings too.
            reply = ProgressReply.model_validate_json(answer.content, extra="ignore")
        except ValidationError as error:
            raise _NotDeliveredError(f"the endpoint's answer is not a ProgressReply: {answer.text[:200]}") from error
        with self._changed:
            self._reply, self._delivered, self._is_deleted = reply, report, bool(reply.is_deleted)

    def _complain(self, error: BaseException | None) -> None:
        if time.monotonic() - self._complained_at >= _SECONDS_BETWEEN_COMPLAINTS:
            self._complained_at = time.monotonic()
            _log.warning("progress did not arrive at %s, training continues: %s", self._reporting.url, error)


def _reason(answer: httpx.Response) -> str:
    """Return the operator's reason for a refusal. Empty: it gives none, or somebody else has answered."""
    try:
        body = answer.json()
    except ValueError:
        return ""
    return str(body.get("reason", "")) if isinstance(body, dict) else ""
