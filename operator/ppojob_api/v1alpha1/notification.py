"""Notifications about jobs: their types, and the part of the status that keeps those that are not delivered yet.

`status.py` has them as `status.notifications`. The operator writes each notification in the same request as the change
of the status that it reports, so neither exists without the other, and removes it when the receiver has accepted it.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.reported import Message, Name, Number, Time

MAX_PENDING = 16
"""Notifications of a job that wait for the receiver; the oldest is dropped for another one."""
MAX_WARNINGS = 16
"""Reasons that a job remembers; the oldest is forgotten first."""


class NotificationType(StrEnum):
    """What has happened to a job. The type of the CloudEvent is `dev.ppojob.job.` and this word."""

    QUEUED = "queued"
    """The job waits for its queue."""
    STARTED = "started"
    """The trainer of an attempt reports for the first time."""
    RETRIED = "retried"
    """An attempt has failed, and another one follows."""
    PREEMPTED = "preempted"
    """The queue evicts the job; the trainer saves a checkpoint and stops."""
    SUSPENDED = "suspended"
    """The job is suspended and has no pods."""
    SUCCEEDED = "succeeded"
    """All steps are done."""
    FAILED = "failed"
    """The job has failed and runs again only on request."""
    RESTARTED = "restarted"
    """Somebody requested another run of a job that had ended."""
    ATTENTION = "attention"
    """Something prevents progress, or will: `reason` and `message` say what, and what to do."""


class PendingNotification(ApiModel):
    """A notification that the receiver has not accepted yet, with the job as it was at `time`."""

    number: int = Field(ge=1)
    """Number of the notification within the job. With the job's uid, it is the id of the CloudEvent."""
    type: Name
    """What has happened: queued, started, retried, preempted, suspended, succeeded, failed, restarted or attention."""
    reason: Name
    """One word for programs: the reason of the condition or Event."""
    message: Message
    """A sentence for people."""
    phase: Name
    """`status.phase` after the change."""
    attempt: int = Field(ge=0)
    """`status.attempt` after the change. For `retried` and `restarted`, it is the attempt that follows."""
    step: int | None = None
    """Steps done. Absent: no trainer has reported."""
    total_steps: int | None = None
    """Steps of the run. Absent: not known."""
    reward: Number | None = None
    """Mean score of the last step's responses. Absent: no step is done."""
    checkpoint: Message | None = None
    """Path or address of the newest checkpoint. Absent: there is none."""
    time: Time
    """When it happened."""


class RecentWarning(ApiModel):
    """The last notification `attention` for a reason."""

    reason: Name
    """Its reason."""
    time: Time
    """Its time. The same reason is notified again after an hour at the earliest."""


class NotificationsStatus(ApiModel):
    """Notifications to the receiver that the administrator has configured."""

    number: int = Field(default=0, ge=0)
    """Number of the last notification."""
    pending: Annotated[list[PendingNotification], Field(max_length=MAX_PENDING)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Notifications that the receiver has not accepted yet, the oldest first."""
    warnings: Annotated[list[RecentWarning], Field(max_length=MAX_WARNINGS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Reasons of the latest `attention`."""
