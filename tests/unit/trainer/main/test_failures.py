"""From an exception to the failure's name, kind and sentence."""

import pytest
from torch.distributed import DistBackendError

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
from ppojob_trainer.algorithms.loader import AlgorithmFunctionError
from ppojob_trainer.checkpoints import CheckpointUnreadableError, FencedOutError, ForeignFilesError
from ppojob_trainer.controller.errors import BatchNotFilledError, PhaseTimeoutError
from ppojob_trainer.data import DataError
from ppojob_trainer.engines.errors import (
    CheckpointUnwritableError,
    EngineClassError,
    EngineLostError,
    ModelMismatchError,
    ModelNotFoundError,
    ModelUnsupportedError,
    NonFiniteError,
    RendezvousError,
    WeightLinkError,
    WeightSyncError,
)
from ppojob_trainer.main.connection import RayNotStartedError
from ppojob_trainer.main.failures import JobFailedError, JobFileMissingError, failure_record, interrupted
from ppojob_trainer.rewards import RewardFunctionError, RewardImportError, RewardTimeoutError
from ppojob_trainer.worker_groups.errors import (
    CallTimeoutError,
    HookFailedError,
    PoolNotPlacedError,
    WorkerFailedError,
    WorkerLostError,
    WorkerOutOfMemoryError,
)

PERMANENT, USER, INFRASTRUCTURE = FailureKind.PERMANENT, FailureKind.USER, FailureKind.INFRASTRUCTURE


class OutOfMemoryError(RuntimeError):
    """As torch's and Ray's are called."""


TIMED_OUT = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"


CASES = [
    (ModelNotFoundError("no model"), Reason.MODEL_NOT_FOUND, PERMANENT),
    (ModelMismatchError("65 tokens"), Reason.MODEL_MISMATCH, PERMANENT),
    (ModelUnsupportedError("gpt_oss"), Reason.MODEL_MISMATCH, PERMANENT),
    (EngineClassError("no class"), Reason.INVALID_SPEC, PERMANENT),
    (CheckpointUnwritableError("no space"), Reason.CHECKPOINT_UNWRITABLE, USER),
    (DataError("no data"), Reason.DATA_UNREADABLE, PERMANENT),
    (AlgorithmFunctionError("wrong shape"), Reason.ALGORITHM_FUNCTION_FAILED, PERMANENT),
    (BatchNotFilledError(1, 2, 0, 8, 16), Reason.BATCH_NOT_FILLED, PERMANENT),
    (RewardImportError("no module"), Reason.REWARD_IMPORT_FAILED, PERMANENT),
    (RewardFunctionError("it raised", 7), Reason.REWARD_FAILED, PERMANENT),
    (RewardTimeoutError("too slow", 7), Reason.REWARD_FAILED, PERMANENT),
    (PoolNotPlacedError("pool critic"), Reason.POOL_NOT_PLACED, INFRASTRUCTURE),
    (CallTimeoutError("not up"), Reason.PHASE_TIMEOUT, INFRASTRUCTURE),
    (RendezvousError("not met"), Reason.PHASE_TIMEOUT, INFRASTRUCTURE),
    (WorkerLostError("actor rank 1"), Reason.WORKER_LOST, INFRASTRUCTURE),
    (EngineLostError("vLLM's engine exited"), Reason.WORKER_LOST, INFRASTRUCTURE),
    (WorkerOutOfMemoryError("actor rank 1"), Reason.OUT_OF_MEMORY, USER),
    (OutOfMemoryError("CUDA out of memory"), Reason.OUT_OF_MEMORY, USER),
    (NonFiniteError("nan"), Reason.NON_FINITE, USER),
    (CheckpointUnreadableError("cannot be read"), Reason.CHECKPOINT_UNREADABLE, PERMANENT),
    (WeightSyncError("other weights"), Reason.TRAINER_FAILED, USER),
    (WeightLinkError("a replica stopped receiving"), Reason.COMMUNICATION_FAILED, INFRASTRUCTURE),
    (DistBackendError("NCCL error: remote process exited"), Reason.COMMUNICATION_FAILED, INFRASTRUCTURE),
    (ConnectionResetError("Connection reset by peer"), Reason.COMMUNICATION_FAILED, INFRASTRUCTURE),
    (RuntimeError(TIMED_OUT), Reason.COMMUNICATION_FAILED, INFRASTRUCTURE),
    (RuntimeError("shapes do not fit"), Reason.TRAINER_FAILED, USER),
    (RayNotStartedError("no Ray"), Reason.TRAINER_FAILED, INFRASTRUCTURE),
    (JobFileMissingError("not there"), Reason.JOB_FILE_MISSING, INFRASTRUCTURE),
    (ZeroDivisionError("division by zero"), Reason.TRAINER_FAILED, USER),
]


@pytest.mark.parametrize(("error", "reason", "kind"), CASES, ids=lambda case: type(case).__name__)
def test_a_failure_in_a_worker_keeps_its_name_and_says_where(error: Exception, reason: str, kind: FailureKind) -> None:
    wrapped = WorkerFailedError("critic rank 2 failed in load: whatever")
    wrapped.__cause__ = error

    record = failure_record(wrapped)

    assert (record.reason, record.kind, record.exit_code) == (reason, kind, 1)
    if type(error) not in (ZeroDivisionError, RuntimeError, ConnectionResetError):
        assert record.message == f"critic rank 2: {error}"


@pytest.mark.parametrize(("error", "reason", "kind"), CASES, ids=lambda case: type(case).__name__)
def test_a_failure_in_the_driver_has_the_same_name(error: Exception, reason: str, kind: FailureKind) -> None:
    record = failure_record(error)

    assert (record.reason, record.kind) == (reason, kind)
    assert str(error) in record.message


@pytest.mark.parametrize(
    ("role", "named"),
    [
        ("critic", "critic"),
        ("rollout_critic", "rollout"),
        ("rollout_gpu_holder", "rollout"),
        ("reward_model", "reward"),
        ("my-judge", "my-judge"),
    ],
)
def test_the_role_of_a_process_is_in_the_record_by_its_name_in_the_spec(role: str, named: str) -> None:
    of_process = WorkerFailedError(f"{role} rank 2 failed in load: whatever").of(role)
    of_process.__cause__ = ValueError("whatever")
    of_hook = HookFailedError("a hook failed")
    of_hook.__cause__ = of_process

    for error in (of_process, of_hook, WorkerLostError(f"{role} rank 2 was lost").of(role)):
        assert failure_record(error).role == named


def test_the_role_of_a_phase_is_in_the_record_and_the_driver_has_none() -> None:
    assert failure_record(PhaseTimeoutError("gen", "rollout", 30)).role == "rollout"
    assert failure_record(ValueError("of the driver")).role is None
    assert "role" not in failure_record(FencedOutError("f", attempt=1, newer=2)).to_wire()


def test_a_phase_that_takes_too_long_names_phase_and_role() -> None:
    record = failure_record(PhaseTimeoutError("gen", "rollout", 30))

    assert (record.reason, record.kind) == (Reason.PHASE_TIMEOUT, INFRASTRUCTURE), "as of a call that hangs in it"
    assert "phase gen of role rollout" in record.message
    assert "trainer.phaseTimeoutSeconds" in record.message


def test_what_only_the_driver_can_find_is_named_too(tmp_path: object) -> None:
    folder = str(tmp_path)
    assert failure_record(FencedOutError(folder, attempt=1, newer=2)).reason == Reason.FENCED_OUT
    foreign = failure_record(ForeignFilesError(folder, uid="a", owner="b"))
    assert (foreign.reason, foreign.kind) == (Reason.CHECKPOINT_UNREADABLE, PERMANENT)


def test_an_unknown_error_in_a_worker_is_reported_with_its_class() -> None:
    wrapped = WorkerFailedError("actor rank 0 failed in update_actor: ZeroDivisionError: division by zero")
    wrapped.__cause__ = ZeroDivisionError("division by zero")

    assert failure_record(wrapped).message == str(wrapped)


def test_a_long_message_still_makes_a_record_that_can_be_read_back() -> None:
    record = failure_record(DataError("x" * 10_000))

    assert FailureRecord.from_log(record.to_log_line()) == record


def test_of_rays_page_about_memory_the_first_line_is_kept() -> None:
    wrapped = WorkerFailedError("critic rank 0 failed in values: OutOfMemoryError: 1 worker(s) were killed")
    wrapped.__cause__ = OutOfMemoryError("1 worker(s) were killed. Memory was 5 GB.\nOOM kill reason: ...\nTop 10 ...")

    record = failure_record(wrapped)

    assert record.message == "critic rank 0: 1 worker(s) were killed. Memory was 5 GB."
    assert record.reason == Reason.OUT_OF_MEMORY


def test_a_failure_that_has_its_name_keeps_it() -> None:
    record = interrupted(step=3)

    assert failure_record(JobFailedError(record)) is record
    assert (record.reason, record.kind, record.exit_code) == (Reason.INTERRUPTED, INFRASTRUCTURE, 130)
