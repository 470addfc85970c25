"""One report's way: identify the sender, parse, check the pod and the job, keep it for the status, answer.

`endpoint.py` calls `identify` with a request's header and then `receive` with its body. It knows no HTTP server. It
refuses with `Refusal`.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TypeVar

from pydantic import ValidationError

from ppojob_api.v1alpha1.progress import Activity, Command, FetchReport, ProgressReply, ProgressReport
from ppojob_api.v1alpha1.versions import unsupported_pair
from ppojob_operator import logs
from ppojob_operator.api_server import ApiRefused, ApiUnavailable, RawObject
from ppojob_operator.reading import finished_condition
from ppojob_operator.status_server import refusals
from ppojob_operator.status_server.authentication import Authenticator, Caller, Sender
from ppojob_operator.status_server.fields import (
    fetch_status,
    newest_order,
    order_of,
    progress_reply,
    progress_status,
)
from ppojob_operator.status_server.ports import JobIdentity, ProgressPort
from ppojob_operator.status_server.writer import ProgressWriter

_LOG = logging.getLogger(__name__)
_MAX_PROBLEMS = 5
Report = TypeVar("Report", ProgressReport, FetchReport)


def utc_now() -> datetime:
    """Return the time of day in UTC."""
    return datetime.now(UTC)


class Intake:
    """Takes reports in."""

    def __init__(
        self,
        port: ProgressPort,
        authenticator: Authenticator,
        writer: ProgressWriter,
        *,
        write_limit_seconds: float,
        version: str,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._port = port
        self._authenticator = authenticator
        self._writer = writer
        self._write_limit = write_limit_seconds
        self._version = version
        self._clock = clock

    async def identify(self, authorization: str | None, namespace: str, name: str, source: str) -> Caller:
        """Return who holds the token of the header, before the body is read.

        Raises:
            Refusal: the token is not good for the job.
        """
        with _api_problems(f"{namespace}/{name}"):
            return await self._authenticator.identify(authorization, namespace, name, source)

    async def receive(self, caller: Caller, body: bytes) -> ProgressReply:
        """Take one report of the trainer and return the answer to the trainer.

        Raises:
            Refusal: the report is not taken; with the HTTP status, a reason and what to do.
        """
        arrived = self._clock()
        report = parse_report(body)
        logs.set_attempt(report.attempt)
        key = caller.key
        sender, job = await self._sender_and_job(caller, report.uid)
        # A deleted job is reported before the account is checked: another job of its name may have another account.
        current = _check_attempt(_check_job(job, key), key, report)
        self._authenticator.check_sender(sender, key, current)
        reply = progress_reply(current, report.attempt, math.ceil(self._writer.interval))
        # Trainers before 0.3 do not report their version.
        if report.trainer_version and (problem := unsupported_pair(self._version, report.trainer_version)):
            if reply.command is Command.STOP:
                # Without the request, the trainer would be stopped without a checkpoint.
                return reply
            raise refusals.unsupported_version(problem)
        is_last = report.activity is Activity.FINISHED
        order = order_of(report)
        newest = max(newest_order(current), self._writer.newest(key))
        if order < newest:
            raise refusals.stale_report(str(key), report.number, newest[1])
        self._writer.keep(key, lambda job: progress_status(report, job, arrived), order=order, is_last=is_last)
        if is_last and not await self._writer.written(key, self._write_limit):
            raise refusals.unavailable("the last report is not written yet: send it again")
        return reply

    async def receive_fetch(self, caller: Caller, body: bytes) -> ProgressReply:
        """Take one report of the pod that fetches models and data. The answer asks for nothing.

        Raises:
            Refusal: the report is not taken; with the HTTP status, a reason and what to do.
        """
        arrived = self._clock()
        report = parse_fetch_report(body)
        sender, job = await self._sender_and_job(caller, report.uid)
        pod = self._authenticator.check_fetcher(sender, caller.key, _check_job(job, caller.key))
        self._writer.keep(caller.key, lambda job: fetch_status(report, pod, job, arrived))
        return ProgressReply()

    async def _sender_and_job(self, caller: Caller, uid: str) -> tuple[Sender, RawObject | None]:
        key = caller.key
        _check_uid(uid, key)
        with _api_problems(str(key)):
            sender = await self._authenticator.check_pod(caller)
            return sender, await self._port.read_job(key.namespace, key.name)


@contextlib.contextmanager
def _api_problems(job: str) -> Iterator[None]:
    """Turn the API server's problems into refusals."""
    try:
        yield
    except ApiUnavailable as error:
        raise refusals.unavailable(f"the API server does not answer ({error})") from error
    except ApiRefused as error:
        _LOG.error("a report of %s cannot be checked: %s", job, error)
        raise refusals.unavailable("the operator lacks a right that it needs to check the report") from error


def _check_uid(reported: str, key: JobIdentity) -> None:
    if reported != key.uid:
        raise refusals.forbidden(f"the report is about uid {reported!r}, and the token is for {key} with uid {key.uid}")


def parse_report(body: bytes) -> ProgressReport:
    """Return the report.

    Raises:
        Refusal: it is not a report; names the fields.
    """
    report = _parse(ProgressReport, body)
    times = {
        "firstStepTime": report.first_step_time,
        "checkpoint.time": report.checkpoint.time if report.checkpoint else None,
    }
    for path, text in times.items():
        if text is not None and not _is_rfc3339(text):
            raise refusals.malformed(f"{path}: {text!r} is not an RFC 3339 time such as 2026-01-31T12:00:00Z")
    return report


def parse_fetch_report(body: bytes) -> FetchReport:
    """Return the report on models and data in a body.

    Raises:
        Refusal: the body is not a report.
    """
    return _parse(FetchReport, body)


def _parse(kind: type[Report], body: bytes) -> Report:
    try:
        # A newer trainer may say more.
        return kind.model_validate_json(body, extra="ignore")
    except ValidationError as error:
        problems = [
            f"{_path(detail['loc'])}: {detail['msg']}"
            for detail in error.errors(include_url=False, include_input=False)
        ]
        raise refusals.malformed("; ".join(problems[:_MAX_PROBLEMS])) from error


def _path(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "body"


def _is_rfc3339(text: str) -> bool:
    try:
        return "T" in text and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _check_job(job: RawObject | None, key: JobIdentity) -> RawObject:
    """Return the job if it takes reports."""
    if job is None:
        raise refusals.job_not_found(str(key))
    if job["metadata"]["uid"] != key.uid:
        raise refusals.other_object(str(key), key.uid, job["metadata"]["uid"])
    condition = finished_condition(job)
    if condition:
        raise refusals.job_finished(str(key), condition)
    return job


def _check_attempt(job: RawObject, key: JobIdentity, report: ProgressReport) -> RawObject:
    """Return the job if it takes a report of this attempt.

    An attempt is in the status before its trainer is sent to Ray; a later one would hide all reports that are true.
    """
    attempt = job.get("status", {}).get("attempt", 0)
    if report.attempt < attempt:
        raise refusals.stale_attempt(str(key), report.attempt, attempt)
    if report.attempt > attempt:
        raise refusals.unknown_attempt(str(key), report.attempt, attempt)
    return job
