"""From an exception to the failure's name, kind and sentence: one table, so that every failure is named in one place.

Called by `run` and `__main__`. The first exception in the chain (`__cause__`) that the table knows gives the name;
what nobody knows is TrainerFailed, which counts against the user's backoffLimit.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
from ppojob_api.v1alpha1.resolve import UnknownFieldsError
from ppojob_trainer.checkpoints import (
    BucketRefusedError,
    BucketUnreachableError,
    CheckpointUnreadableError,
    CredentialsMissingError,
    FencedOutError,
    ForeignFilesError,
)
from ppojob_trainer.controller.errors import PhaseTimeoutError
from ppojob_trainer.data import DataError
from ppojob_trainer.engines.errors import EngineError
from ppojob_trainer.main.connection import RayNotStartedError
from ppojob_trainer.rewards import RewardError, RewardImportError
from ppojob_trainer.telemetry import MetricsUnreadableError, TrackerMissingError
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.errors import (
    CallTimeoutError,
    HookFailedError,
    PoolNotPlacedError,
    WorkerFailedError,
    WorkerImportError,
    WorkerLostError,
    WorkerOutOfMemoryError,
)

__all__ = ["INTERRUPTED_EXIT_CODE", "JobFailedError", "JobFileMissingError", "failure_record", "interrupted"]

INTERRUPTED_EXIT_CODE = 130
_MAX_MESSAGE = 4096


class JobFileMissingError(RuntimeError):
    """The file with the submission's hash did not come."""


class JobFailedError(RuntimeError):
    """A job failed, and this is its name; `__cause__` is the exception that ended it."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(record.message)
        self.record = record


# The most special class first.
_NAMES: tuple[tuple[type[BaseException], str, FailureKind], ...] = (
    (UnknownFieldsError, Reason.TRAINER_TOO_OLD, FailureKind.PERMANENT),
    (JobFileMissingError, Reason.JOB_FILE_MISSING, FailureKind.INFRASTRUCTURE),
    (DataError, Reason.DATA_UNREADABLE, FailureKind.PERMANENT),
    (RewardImportError, Reason.REWARD_IMPORT_FAILED, FailureKind.PERMANENT),
    (RewardError, Reason.REWARD_FAILED, FailureKind.USER),
    (WorkerImportError, Reason.WORKER_IMPORT_FAILED, FailureKind.PERMANENT),
    (HookFailedError, Reason.HOOK_FAILED, FailureKind.USER),
    (PoolNotPlacedError, Reason.POOL_NOT_PLACED, FailureKind.INFRASTRUCTURE),
    # Of a collective that hangs, the phase and the call run out of the same limit, and either may be first. Both count
    # as the cluster's: the next attempt then gets other pods, and not the connection that hung. A limit that is too
    # short for the work looks the same; its message names the key.
    (PhaseTimeoutError, Reason.PHASE_TIMEOUT, FailureKind.INFRASTRUCTURE),
    (CallTimeoutError, Reason.PHASE_TIMEOUT, FailureKind.INFRASTRUCTURE),
    (WorkerLostError, Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE),
    (WorkerOutOfMemoryError, Reason.OUT_OF_MEMORY, FailureKind.USER),
    (MemoryError, Reason.OUT_OF_MEMORY, FailureKind.USER),
    (CheckpointUnreadableError, Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
    (ForeignFilesError, Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
    (MetricsUnreadableError, Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
    (BucketRefusedError, Reason.BUCKET_REFUSED, FailureKind.PERMANENT),
    # The machine's own credentials can be away for a while, so trying again may help.
    (CredentialsMissingError, Reason.BUCKET_REFUSED, FailureKind.USER),
    (BucketUnreachableError, Reason.BUCKET_UNREACHABLE, FailureKind.INFRASTRUCTURE),
    (FencedOutError, Reason.FENCED_OUT, FailureKind.INFRASTRUCTURE),
    (TrackerMissingError, Reason.TRAINER_FAILED, FailureKind.PERMANENT),
    (RayNotStartedError, Reason.TRAINER_FAILED, FailureKind.INFRASTRUCTURE),
    (KeyboardInterrupt, Reason.INTERRUPTED, FailureKind.INFRASTRUCTURE),
)

# The engines name the reason themselves; whom it counts against is decided here.
_ENGINE_KINDS = {
    Reason.INVALID_SPEC: FailureKind.PERMANENT,
    Reason.MODEL_NOT_FOUND: FailureKind.PERMANENT,
    Reason.MODEL_MISMATCH: FailureKind.PERMANENT,
    Reason.CHECKPOINT_UNREADABLE: FailureKind.PERMANENT,
    Reason.PHASE_TIMEOUT: FailureKind.INFRASTRUCTURE,
    Reason.COMMUNICATION_FAILED: FailureKind.INFRASTRUCTURE,
    Reason.BUCKET_UNREACHABLE: FailureKind.INFRASTRUCTURE,
}

# Classes of packages that this module must not load: torch's for a GPU, and Ray's for a node, whose message is a page.
_NAMES_OF_FOREIGN = {"OutOfMemoryError": (Reason.OUT_OF_MEMORY, FailureKind.USER)}


def failure_record(error: BaseException) -> FailureRecord:
    """Return the name of a failure, with the sentence of the exception that gave it."""
    if isinstance(error, JobFailedError):
        return error.record
    for link in _chain(error):
        named = _name(link)
        if named is not None:
            reason, kind = named
            exit_code = INTERRUPTED_EXIT_CODE if reason == Reason.INTERRUPTED else 1
            return FailureRecord(reason=reason, message=_sentence(error, link), kind=kind, exit_code=exit_code)
    return FailureRecord(reason=Reason.TRAINER_FAILED, message=_sentence(error, error), kind=FailureKind.USER)


def interrupted(step: int) -> FailureRecord:
    """Return the record of a run that was stopped in order."""
    return FailureRecord(
        reason=Reason.INTERRUPTED,
        message=f"stopped in order after step {step}; the run goes on from its last checkpoint",
        kind=FailureKind.INFRASTRUCTURE,
        exit_code=INTERRUPTED_EXIT_CODE,
    )


def _name(error: BaseException) -> tuple[str, FailureKind] | None:
    if isinstance(error, EngineError):
        return error.reason, _ENGINE_KINDS.get(error.reason, FailureKind.USER)
    for known, reason, kind in _NAMES:
        if isinstance(error, known):
            return reason, kind
    if is_of_communication(error):
        return Reason.COMMUNICATION_FAILED, FailureKind.INFRASTRUCTURE
    return _NAMES_OF_FOREIGN.get(type(error).__name__)


def _sentence(error: BaseException, named: BaseException) -> str:
    """The named exception's own words; a worker's role and rank go before them."""
    text = str(named).strip() or type(named).__name__
    if type(named).__name__ in _NAMES_OF_FOREIGN:
        text = text.partition("\n")[0]
    if named is error or not isinstance(error, WorkerFailedError):
        text = text if named is not error or _is_ours(error) else f"{type(error).__name__}: {text}"
        return text[:_MAX_MESSAGE]
    where = str(error).partition(" failed in ")[0]
    return f"{where}: {text}"[:_MAX_MESSAGE]


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("ppojob_")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
