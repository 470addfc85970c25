"""Maps an exception to the failure's name, kind and message. One table names every failure.

Called by `run` and `__main__`. The first exception in the chain (`__cause__`) that is in the table gives the name; any
other exception is TrainerFailed, which counts against the user's backoffLimit.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
from ppojob_api.v1alpha1.resolve import OtherVersionError
from ppojob_trainer.algorithms import AlgorithmFunctionError
from ppojob_trainer.checkpoints import (
    BucketRefusedError,
    BucketUnreachableError,
    CheckpointUnreadableError,
    CredentialsMissingError,
    FencedOutError,
    ForeignCheckpointError,
    ForeignFilesError,
)
from ppojob_trainer.controller.errors import BatchNotFilledError, PhaseTimeoutError
from ppojob_trainer.data import DataError
from ppojob_trainer.engines.errors import EngineError
from ppojob_trainer.exports import UploadCredentialsError, UploadRefusedError
from ppojob_trainer.main.connection import RayNotStartedError
from ppojob_trainer.main.monitor import JobDeletedError
from ppojob_trainer.rewards import RewardError, RewardFunctionError, RewardImportError, RewardRefusedError
from ppojob_trainer.telemetry import MetricsUnreadableError, TrackerMissingError
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.errors import (
    CallTimeoutError,
    GPUFaultError,
    HookFailedError,
    PoolNotPlacedError,
    WorkerFailedError,
    WorkerGroupError,
    WorkerImportError,
    WorkerLostError,
    WorkerOutOfMemoryError,
)

__all__ = ["INTERRUPTED_EXIT_CODE", "JobFailedError", "JobFileMissingError", "failure_record", "interrupted"]

INTERRUPTED_EXIT_CODE = 130
_MAX_MESSAGE = 4096


class JobFileMissingError(RuntimeError):
    """The file with the submission's hash did not appear in time."""


class JobFailedError(RuntimeError):
    """A job failed; `record` has the failure's name, `__cause__` the exception that ended it."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(record.message)
        self.record = record


# The most specific class first.
_NAMES: tuple[tuple[type[BaseException], str, FailureKind], ...] = (
    (OtherVersionError, Reason.TRAINER_TOO_OLD, FailureKind.PERMANENT),
    (JobFileMissingError, Reason.JOB_FILE_MISSING, FailureKind.INFRASTRUCTURE),
    (DataError, Reason.DATA_UNREADABLE, FailureKind.PERMANENT),
    (RewardImportError, Reason.REWARD_IMPORT_FAILED, FailureKind.PERMANENT),
    # The seeds give the same responses again, so another attempt fails at the same one.
    (RewardFunctionError, Reason.REWARD_FAILED, FailureKind.PERMANENT),
    (RewardRefusedError, Reason.REWARD_FAILED, FailureKind.PERMANENT),
    (RewardError, Reason.REWARD_FAILED, FailureKind.USER),
    (AlgorithmFunctionError, Reason.ALGORITHM_FUNCTION_FAILED, FailureKind.PERMANENT),
    # The seeds give the same responses again.
    (BatchNotFilledError, Reason.BATCH_NOT_FILLED, FailureKind.PERMANENT),
    (WorkerImportError, Reason.WORKER_IMPORT_FAILED, FailureKind.PERMANENT),
    (HookFailedError, Reason.HOOK_FAILED, FailureKind.USER),
    (PoolNotPlacedError, Reason.POOL_NOT_PLACED, FailureKind.INFRASTRUCTURE),
    # If a collective hangs, the phase and the call reach the same limit, and either may be first. Both count as
    # infrastructure failures: the next attempt then gets other pods and a new connection. A limit that is too short for
    # the work looks the same; its message names the key.
    (PhaseTimeoutError, Reason.PHASE_TIMEOUT, FailureKind.INFRASTRUCTURE),
    (CallTimeoutError, Reason.PHASE_TIMEOUT, FailureKind.INFRASTRUCTURE),
    (GPUFaultError, Reason.GPU_FAULT, FailureKind.INFRASTRUCTURE),
    (WorkerLostError, Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE),
    (WorkerOutOfMemoryError, Reason.OUT_OF_MEMORY, FailureKind.USER),
    (MemoryError, Reason.OUT_OF_MEMORY, FailureKind.USER),
    (CheckpointUnreadableError, Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
    (ForeignCheckpointError, Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
    (ForeignFilesError, Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
    (MetricsUnreadableError, Reason.CHECKPOINT_UNREADABLE, FailureKind.PERMANENT),
    (BucketRefusedError, Reason.BUCKET_REFUSED, FailureKind.PERMANENT),
    # The machine's own credentials can be unavailable for a while, so a retry may help.
    (CredentialsMissingError, Reason.BUCKET_REFUSED, FailureKind.USER),
    (BucketUnreachableError, Reason.BUCKET_UNREACHABLE, FailureKind.INFRASTRUCTURE),
    # Only before a run begins: later an upload that fails is reported, and ends nothing.
    (UploadCredentialsError, Reason.UPLOAD_REFUSED, FailureKind.USER),
    (UploadRefusedError, Reason.UPLOAD_REFUSED, FailureKind.PERMANENT),
    (FencedOutError, Reason.FENCED_OUT, FailureKind.INFRASTRUCTURE),
    (JobDeletedError, Reason.FENCED_OUT, FailureKind.INFRASTRUCTURE),
    (TrackerMissingError, Reason.TRAINER_FAILED, FailureKind.PERMANENT),
    (RayNotStartedError, Reason.TRAINER_FAILED, FailureKind.INFRASTRUCTURE),
    (KeyboardInterrupt, Reason.INTERRUPTED, FailureKind.INFRASTRUCTURE),
)

# The engines give the reason themselves; this module decides whether it counts against the user.
_ENGINE_KINDS = {
    Reason.INVALID_SPEC: FailureKind.PERMANENT,
    Reason.MODEL_NOT_FOUND: FailureKind.PERMANENT,
    Reason.MODEL_MISMATCH: FailureKind.PERMANENT,
    Reason.CHECKPOINT_UNREADABLE: FailureKind.PERMANENT,
    Reason.PHASE_TIMEOUT: FailureKind.INFRASTRUCTURE,
    Reason.WORKER_LOST: FailureKind.INFRASTRUCTURE,
    Reason.COMMUNICATION_FAILED: FailureKind.INFRASTRUCTURE,
    Reason.BUCKET_UNREACHABLE: FailureKind.INFRASTRUCTURE,
}

# Classes of packages that this module must not import: torch's for a GPU; Ray's for a node, whose message is a page.
_NAMES_OF_FOREIGN = {"OutOfMemoryError": (Reason.OUT_OF_MEMORY, FailureKind.USER)}


def failure_record(error: BaseException) -> FailureRecord:
    """Return the record of a failure: its name and kind, and the message of the exception that gave the name."""
    if isinstance(error, JobFailedError):
        return error.record
    for link in _chain(error):
        named = _name(link)
        if named is not None:
            reason, kind = named
            exit_code = INTERRUPTED_EXIT_CODE if reason == Reason.INTERRUPTED else 1
            address = link.address if isinstance(link, GPUFaultError) else None
            return FailureRecord(
                reason=reason,
                message=_sentence(error, link),
                kind=kind,
                exit_code=exit_code,
                address=address,
                role=_role(error),
                only_processes=isinstance(error, WorkerGroupError) and error.only_processes,
            )
    message, role = _sentence(error, error), _role(error)
    return FailureRecord(reason=Reason.TRAINER_FAILED, message=message, kind=FailureKind.USER, role=role)


def interrupted(step: int) -> FailureRecord:
    """Return the record of a run that was stopped gracefully."""
    return FailureRecord(
        reason=Reason.INTERRUPTED,
        message=f"stopped gracefully after step {step}; the run resumes from its last checkpoint",
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
    """Return the message of the named exception, with a worker's role and rank before it."""
    text = str(named).strip() or type(named).__name__
    if type(named).__name__ in _NAMES_OF_FOREIGN:
        text = text.partition("\n")[0]
    if named is error or not isinstance(error, WorkerFailedError):
        text = text if named is not error or _is_ours(error) else f"{type(error).__name__}: {text}"
        return text[:_MAX_MESSAGE]
    where = str(error).partition(" failed in ")[0]
    return f"{where}: {text}"[:_MAX_MESSAGE]


def _role(error: BaseException) -> str | None:
    """Return whose process or phase failed, by the API's names. None: the driver's own failure."""
    errors = (link for link in _chain(error) if isinstance(link, WorkerGroupError | PhaseTimeoutError))
    role = next((link.role for link in errors if link.role is not None), None)
    # Roles of further pools are rollout_<pool>, ref_<pool> and reward_model_<pool>; the API calls reward_model reward.
    # Workers' names have no _.
    return None if role is None else role.partition("_")[0]


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("ppojob_")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
