"""What trainer and fetch report, what the reply says, and how a failure is named.

The trainer POSTs a `ProgressReport` to the operator's status endpoint at least once in an interval and gets a
`ProgressReply`. A failure is one marked line at the end of the driver's log, because the log outlives the connection.
"""

import json
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.reported import CheckpointStatus, LayoutAdvice, SourceStatus, StepChecks, UploadFailure
from ppojob_api.v1alpha1.training import CheckpointSpec, TrainerSpec

_JOB_PATH = "/v1alpha1/namespaces/{namespace}/ppojobs/{name}"
_PROGRESS, _FETCH = "/progress", "/fetch"
REPORT_PATH = f"{_JOB_PATH}{_PROGRESS}"
FETCH_PATH = f"{_JOB_PATH}{_FETCH}"
MAX_REPORT_BYTES = 64 * 1024
MAX_REPORT_INTERVAL_SECONDS = 30
"""Longest time between two reports that the operator may ask for."""
FETCH_REFUSED_EXIT_CODE = 3
"""Exit code of the fetch if another try cannot help; its Job ends at once."""
MAX_COUNT = 2**53 - 1
"""Largest count: larger integers are not exact in every reader of JSON."""
MAX_STEPS = 2**31 - 1
"""Largest number of a step or an attempt, as in spec.trainer.totalSteps."""


def progress_audience(namespace: str, name: str, uid: str) -> str:
    """Return the audience of a job's tokens: a token that was made for one object is worth nothing for another."""
    return f"{constants.GROUP}/{namespace}/{name}/{uid}"


def fetch_url(report_url: str) -> str:
    """Return where the fetch of a job's models and data is reported, given the trainer's address."""
    return report_url.removesuffix(_PROGRESS) + _FETCH


class Activity(StrEnum):
    """Current activity of the trainer."""

    LOADING = "Loading"
    VALIDATING = "Validating"
    TRAINING = "Training"
    SAVING = "Saving"
    EXPORTING = "Exporting"
    FINISHED = "Finished"


class PoolReport(ApiModel):
    """How busy a pool was in the last step."""

    name: Annotated[str, Field(max_length=40)]
    """Name of the pool."""
    busy_fraction: float = Field(ge=0, le=1)
    """Share of the step in which some role of the pool computed."""
    engines: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Engines of an elastic pool that generate. Absent: the pool is not elastic."""


class ProgressReport(ApiModel):
    """One report; it carries everything that is known, so that a lost one does no harm."""

    uid: Annotated[str, Field(max_length=64)]
    """UID of the PPOJob."""
    attempt: int = Field(ge=0, le=MAX_STEPS)
    """Number of the attempt; a report of any but the current one is refused."""
    number: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Number of the report within the attempt, from 1: a lower one than the last is refused, by every replica of the
    operator. 0: not numbered."""
    activity: Activity
    """Current activity of the trainer."""
    step: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps done. May exceed totalSteps, which may be lowered while the job runs."""
    total_steps: int = Field(ge=0, le=MAX_STEPS)
    """Steps of the run. 0: not known yet, because the data is not loaded."""
    phases: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Phases of steps, of loading and of saving that this attempt has done: they show progress within a long step."""
    eta_seconds: float | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Estimated time to the end, in seconds."""
    reward: float | None = None
    """Mean score of the last step's responses."""
    first_validation_reward: float | None = None
    """Mean score of the first validation of the run."""
    validation_reward: float | None = None
    """Mean score of the last validation."""
    first_step_time: Annotated[str, Field(max_length=64)] | None = None
    """When the first step was done, as RFC 3339."""
    metrics: Annotated[dict[Annotated[str, Field(max_length=253)], float], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Metrics of the last step."""
    pools: Annotated[list[PoolReport], Field(max_length=7)] = Field(default_factory=list)
    """How busy each pool was."""
    checks: StepChecks | None = None
    """Results of the checks of the last step. Absent: no step is done yet."""
    checkpoint: CheckpointStatus | None = None
    """The newest checkpoint."""
    model_path: Annotated[str, Field(max_length=4096)] | None = None
    """The newest export of the policy."""
    model_address: Annotated[str, Field(max_length=4096)] | None = None
    """Where its newest complete upload is. Absent: this attempt has uploaded none."""
    upload_failure: UploadFailure | None = None
    """Why the last upload failed. Absent: it did not."""
    recommendation: Annotated[str, Field(max_length=4096)] | None = None
    """What the measured phases say about the layout. Absent: not known yet; empty: nothing."""
    layout_advice: Annotated[list[LayoutAdvice], Field(max_length=3)] | None = None
    """The layouts of the recommendation."""
    trainer_version: Annotated[str, Field(max_length=64)] | None = None
    """Version of the trainer."""


class FetchReport(ApiModel):
    """One report of the pod that fetches models and data; it carries everything that is known."""

    uid: Annotated[str, Field(max_length=64)]
    """UID of the PPOJob."""
    number: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Number of the report of this pod, from 1."""
    address: Annotated[str, Field(max_length=4096)] | None = None
    """What is fetched at the moment."""
    bytes: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Bytes that are in the storage, of all addresses."""
    total_bytes: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Bytes of all addresses. Absent: not all sizes are known yet."""
    message: Annotated[str, Field(max_length=4096)] | None = None
    """What it waits for, or why it failed."""
    sources: Annotated[list[SourceStatus], Field(max_length=constants.MAX_SOURCES)] = Field(default_factory=list)
    """What is complete."""


class Command(StrEnum):
    """What the operator requests of the trainer."""

    NONE = "None"
    STOP = "Stop"
    """Graceful stop: finish what cannot be dropped, save a checkpoint, exit."""


class LiveSettings(ApiModel):
    """The part of the spec that may change while the job runs."""

    total_steps: int | None = Field(default=None, ge=1)
    """spec.trainer.totalSteps. Absent: totalEpochs is given."""
    total_epochs: int | None = Field(default=None, ge=1)
    """spec.trainer.totalEpochs."""
    validate_every_steps: int = Field(ge=0)
    """spec.trainer.validateEverySteps."""
    checkpoint_every_steps: int = Field(ge=0)
    """spec.checkpoint.everySteps."""
    checkpoint_keep: int = Field(ge=1)
    """spec.checkpoint.keep."""

    @classmethod
    def of(cls, trainer: TrainerSpec, checkpoint: CheckpointSpec) -> "LiveSettings":
        """Return those of a spec."""
        length = trainer.with_length()
        return cls(
            total_steps=length.total_steps,
            total_epochs=length.total_epochs,
            validate_every_steps=trainer.validate_every_steps,
            checkpoint_every_steps=checkpoint.every_steps,
            checkpoint_keep=checkpoint.keep,
        )

    def steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the run; 0 if they depend on the data and `steps_per_epoch` is not known yet (0)."""
        return self.total_steps or (self.total_epochs or 0) * steps_per_epoch


class ProgressReply(ApiModel):
    """Answer to a report. A newer operator may say more than the trainer knows."""

    model_config = ConfigDict(extra="ignore")

    command: Command = Command.NONE
    """What the operator requests of the trainer."""
    is_deleted: bool | None = None
    """The PPOJob is being deleted, so a trainer whose pods are deleted needs no checkpoint. Absent: it is not."""
    checkpoint_request: Annotated[str, Field(max_length=constants.MAX_REQUEST_LENGTH)] | None = None
    """A request for a checkpoint that is not answered yet; the answer is `checkpoint.request` of a report."""
    settings: LiveSettings | None = None
    """The part of the spec that may change while the job runs."""
    interval_seconds: int | None = Field(default=None, ge=1)
    """The longest time to the next report that the operator asks for, with many jobs more than with few. The trainer
    uses at least its own interval and at most `MAX_REPORT_INTERVAL_SECONDS`."""


class FailureKind(StrEnum):
    """The cause of a failure. Rules of `runPolicy.failurePolicy` take precedence over what it says of a retry."""

    PERMANENT = "Permanent"
    """A retry cannot help: a wrong path, a module that does not import."""
    USER = "User"
    """The program failed."""
    INFRASTRUCTURE = "Infrastructure"
    """The cluster failed."""


class FailureRecord(ApiModel):
    """The trainer's own name for its failure. A newer trainer may say more than the operator knows."""

    model_config = ConfigDict(extra="ignore")

    reason: Annotated[str, Field(min_length=1, max_length=253)]
    """One of `constants.Reason`."""
    message: Annotated[str, Field(max_length=4096)]
    """A sentence with what is wrong and what to do."""
    kind: FailureKind
    """The cause, which decides whether a retry may help."""
    exit_code: int = 1
    """Exit code of the trainer."""
    address: Annotated[str, Field(max_length=64)] | None = None
    """IP address of the pod whose GPU has failed. Absent: another failure."""
    role: Annotated[str, Field(max_length=63)] | None = None
    """Role of the process that failed, or name of a worker in `spec.workers`. Absent: none, or unknown."""
    only_processes: bool = False
    """Processes were lost, and all pods of the fixed pools were still connected to Ray. False: also if not known."""

    def to_log_line(self) -> str:
        """Return the marked line that ends the driver's log."""
        return f"{_MARK} {json.dumps(self.to_wire())}"

    @classmethod
    def from_log(cls, log: str) -> "FailureRecord | None":
        """Return the record in the last marked line of a log, or None where there is none that can be read."""
        for line in reversed(log.splitlines()):
            _, mark, record = line.partition(f"{_MARK} ")
            if mark:
                return _parse(record)
        return None


_MARK = "PPOJOB-FAILURE"


def _parse(record: str) -> FailureRecord | None:
    try:
        return FailureRecord.model_validate_json(record)
    except ValidationError:
        return None
