"""Why a report is refused: HTTP status, one word for programs, and a sentence that says what to do.

The trainer stops on 409 and 410 (it was replaced), and on 404 if its pods are being deleted too; it continues on
everything else. Nothing here may carry a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Refusal(Exception):
    """A report that is not taken."""

    status: int
    reason: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return `reason: message`."""
        return f"{self.reason}: {self.message}"


def malformed(problem: str) -> Refusal:
    """Return the answer to a body that is not a ProgressReport."""
    return Refusal(400, "Malformed", f"{problem}; send a ProgressReport of ppojob.dev/v1alpha1 as JSON")


def unauthenticated(problem: str) -> Refusal:
    """Return the answer to a request without a token that is good for this job."""
    return Refusal(401, "Unauthenticated", problem, {"WWW-Authenticate": "Bearer"})


def forbidden(problem: str) -> Refusal:
    """Return the answer to a good token whose holder may not report for this job."""
    return Refusal(403, "Forbidden", problem)


def job_not_found(job: str) -> Refusal:
    """Return the answer where there is no such PPOJob."""
    return Refusal(404, "JobNotFound", f"there is no PPOJob {job}: it was deleted; stop the trainer")


def slow_body(seconds: float) -> Refusal:
    """Return the answer to a body that does not arrive."""
    return Refusal(408, "TooSlow", f"the report did not arrive within {seconds:g} s: send it in one piece")


def other_object(job: str, reported: str, actual: str) -> Refusal:
    """Return the answer to a report for an earlier object of the same name."""
    message = f"PPOJob {job} with uid {reported} was deleted, another one has its name (uid {actual}): stop the trainer"
    return Refusal(409, "OtherObject", message)


def stale_attempt(job: str, reported: int, current: int) -> Refusal:
    """Return the answer to an attempt that was replaced."""
    message = f"attempt {reported} of PPOJob {job} was replaced by attempt {current}: stop this trainer without saving"
    return Refusal(409, "StaleAttempt", message)


def unknown_attempt(job: str, reported: int, current: int) -> Refusal:
    """Return the answer to an attempt that has not started. It stops no trainer: the operator's view may lag."""
    message = f"attempt {reported} of PPOJob {job} has not started, the current one is {current}: send the report again"
    return Refusal(422, "UnknownAttempt", message)


def stale_report(job: str, reported: int, newest: int) -> Refusal:
    """Return the answer to a report that is older than one that the operator has. It stops no trainer."""
    message = (
        f"report {reported} of PPOJob {job} is older than report {newest}, which has already arrived: increase "
        "the number with each report"
    )
    return Refusal(422, "StaleReport", message)


def unsupported_version(problem: str) -> Refusal:
    """Return the answer to a trainer whose version is too far from the operator's. It stops no trainer."""
    return Refusal(422, "UnsupportedVersion", problem)


def job_finished(job: str, condition: str) -> Refusal:
    """Return the answer where the job is over."""
    message = f"PPOJob {job} is {condition} and accepts no more reports: stop the trainer"
    return Refusal(410, "JobFinished", message)


def too_large(limit: int) -> Refusal:
    """Return the answer to a body beyond the limit."""
    message = f"a report has at most {limit} bytes: send only the metrics of constants.STATUS_METRICS"
    return Refusal(413, "TooLarge", message)


def disconnected() -> Refusal:
    """Return the end of a request whose sender closed the connection; nobody receives it."""
    return Refusal(400, "Disconnected", "the connection ended before the report arrived: send it again")


def too_many_requests(problem: str) -> Refusal:
    """Return the answer to a sender that asks for more than its share."""
    return Refusal(429, "TooManyRequests", problem, {"Retry-After": "10"})


def unavailable(problem: str) -> Refusal:
    """Return the answer where the operator cannot decide or write at the moment."""
    message = f"{problem}: continue training and send the next report as usual"
    return Refusal(503, "Unavailable", message, {"Retry-After": "10"})
